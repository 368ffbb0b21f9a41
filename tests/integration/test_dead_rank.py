"""A rank that raises ends the call with its number and the cause. One that is killed: tests/training/test_killed_rank.py."""

import pytest

from skyrl_engine.errors import WorkerError
from skyrl_engine.workers.launch import launch_workers

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves sockets of its own to the garbage collector


def test_a_rank_that_raises_is_named_with_its_cause(models, worker_spec):
    """Other errors than typed ones reach the controller with rank, method and first line."""
    with launch_workers(worker_spec(models["llama"], 2), launch="ray") as group, pytest.raises(WorkerError) as caught:
        group._everywhere("no_such_method")
    assert "rank 0 failed in no_such_method: AttributeError" in str(caught.value)
