"""Joining torch.distributed, also inside a program that has done so itself."""

import pytest
import torch.distributed as dist

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.workers.process_group import join, leave


@pytest.fixture
def embedding_program():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_its_own_is_made_and_left():
    assert join(0, 1, "cpu", None)
    assert dist.is_initialized()
    leave()
    assert not dist.is_initialized()


def test_the_embedding_programs_group_is_used_and_not_owned(embedding_program):
    assert not join(0, 1, "cpu", None)


def test_another_size_than_the_runs_is_refused(embedding_program):
    with pytest.raises(UnsupportedError, match="process group of 1, the run has 2 ranks"):
        join(0, 2, "cpu", None)
