"""Joining torch.distributed, also inside a program that has done so itself."""

import multiprocessing
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from skyrl_engine.contracts import ModelConfig
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.workers import process_group
from skyrl_engine.workers.process_group import (
    COLLECTIVE_TIMEOUT,
    LOADED_PER_SECOND,
    Rendezvous,
    allow_time_to_load,
    join,
    leave,
    time_to_load,
)


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


def _wait_for_a_slow_rank(rank: int, folder: str, allowed: bool, port: int) -> None:
    """Rank 0 takes four seconds where two are allowed, unless for the files."""
    process_group.COLLECTIVE_TIMEOUT = timedelta(seconds=2)
    process_group.LOADED_PER_SECOND = 10_000  # type: ignore[misc] # so that the tiny model's files take more than four
    join(rank, 2, "cpu", Rendezvous("127.0.0.1", port))
    if allowed:
        allow_time_to_load(ModelConfig(folder))
    if rank == 0:
        time.sleep(4)
    dist.barrier()
    leave()


@pytest.mark.parametrize("allowed", [True, False])
def test_ranks_wait_as_long_as_the_weights_are_large(tmp_path: Path, allowed: bool) -> None:
    write_model(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size > 60_000
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_wait_for_a_slow_rank, args=(rank, str(tmp_path), allowed, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert (ranks[1].exitcode == 0) is allowed


def test_the_time_follows_the_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert time_to_load(ModelConfig(str(tmp_path))) == COLLECTIVE_TIMEOUT  # without weights, which loading refuses
    write_model(tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as file:
        size = file.seek(0, 2)
    expected = COLLECTIVE_TIMEOUT.total_seconds() + size / LOADED_PER_SECOND
    assert time_to_load(ModelConfig(str(tmp_path))).total_seconds() == pytest.approx(expected, abs=1e-5)


def test_another_size_than_the_runs_is_refused(embedding_program):
    with pytest.raises(UnsupportedError, match="process group of 1, the run has 2 ranks"):
        join(0, 2, "cpu", None)
