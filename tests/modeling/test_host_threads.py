"""The threads of an offloaded optimizer: a rank's share of its machine's cores, which two ranks here can see without a GPU."""

import os

import torch

from skyrl_engine.modeling.host_threads import share_cores
from skyrl_engine.testing.ranks.world import World


def threads(before: int) -> int:
    """Share eight cores, for a rank that has had so many threads."""
    count, cores = torch.get_num_threads(), os.sched_getaffinity
    os.sched_getaffinity = lambda _process: set(range(8))
    try:
        torch.set_num_threads(before)
        assert share_cores() == torch.get_num_threads()
        return torch.get_num_threads()
    finally:
        os.sched_getaffinity = cores
        torch.set_num_threads(count)


def test_ranks_of_a_machine_share_its_cores(pair: World) -> None:
    assert pair.run(threads, 1) == [4, 4]


def test_threads_that_a_rank_has_already_stay(pair: World) -> None:
    assert pair.run(threads, 6) == [6, 6]
