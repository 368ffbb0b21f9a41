"""Ranks answer in their order, raise what they met, and are replaced when one of them is dead or hangs."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from skyrl_engine.errors import UnsupportedError, WorkerError
from skyrl_engine.testing.ranks.world import World, start_shared_world
from skyrl_engine.workers.process_group import join


def test_results_come_by_rank_and_ranks_stay(pair: World) -> None:
    assert pair.run(dist.get_rank) == [0, 1]
    assert pair.run(dist.get_world_size) == [2, 2]
    processes = pair.run(os.getpid)
    assert len({*processes, os.getpid()}) == 3
    assert pair.run(os.getpid) == processes
    assert start_shared_world(2) is pair


def test_what_a_rank_raises_is_told_and_ends_no_rank(pair: World) -> None:
    processes = pair.run(os.getpid)
    with pytest.raises(UnsupportedError, match="a torch process group of 2, the run has 3 ranks"):
        pair.run(join, 0, 3, "cpu", None)
    with pytest.raises(AssertionError, match=r"Traceback(.|\n)*ValueError: invalid literal"):
        pair.run(int, "nonsense")
    assert pair.run(os.getpid) == processes


def test_a_dead_rank_is_named_and_others_start_with_the_next_call() -> None:
    with World(2) as world:
        first = world.run(os.getpid)
        os.kill(first[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1 died") as caught:
            world.run(time.sleep, 0)
        assert caught.value.rank == 1
        second = world.run(os.getpid)
        assert not {*first} & {*second}
        assert world.run(dist.get_rank) == [0, 1]


def test_ranks_that_do_not_answer_in_time_are_ended() -> None:
    with World(2, timeout=20.0) as world:
        processes = world.run(os.getpid)
        world._timeout = 0.5
        with pytest.raises(WorkerError, match="rank 0 did not answer"):
            world.run(time.sleep, 60)
        for process in processes:
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)


def test_ranks_see_the_environment_of_the_time_when_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_ENGINE_OF_THIS_TEST", "here")
    with World(1) as world:
        assert world.run(os.getenv, "SKYRL_ENGINE_OF_THIS_TEST") == ["here"]
