"""Gradients are summed over ranks as often as they must be, and are the definition's: collectives are counted, on gloo.

Not covered: NCCL, and how much of a sum a backward pass hides (`nox -s gpu`).
"""

from collections import Counter

import pytest
from fsdp_sums import count_sums, fail_and_go_on

from skyrl_engine.testing.backends.batches import definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.plugin import FsdpConfig

UNITS = 3
"""Units of the tiny model: two layers, and all else."""

LAYOUTS = {
    "copies": (FsdpConfig(replicate=2), lambda micro_batches: {"reduce_scatter": UNITS * micro_batches, "all_reduce": UNITS}),
    "copies, once": (FsdpConfig(replicate=2, gradient_sync="pass"), lambda _: {"reduce_scatter": UNITS, "all_reduce": UNITS}),
    "shards": (FsdpConfig(), lambda micro_batches: {"reduce_scatter": UNITS * micro_batches}),
    "shards, once": (FsdpConfig(gradient_sync="pass"), lambda _: {"reduce_scatter": UNITS}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_do_not_grow_with_micro_batches(quad: World, models: dict[str, str], layout: str) -> None:
    """One micro-batch, two, and two calls of two, whose gradients add up; in float64, against the plain definition."""
    options, due_of = LAYOUTS[layout]
    due = definition(models["qwen3-tied"], documents())
    for rank in quad.run(count_sums, models["qwen3-tied"], options):
        for micro_batches, sums, gradients in rank.of_one_call:
            assert Counter(sums) == Counter(due_of(micro_batches))
            assert find_worst_difference(gradients, due.gradients) <= 1e-10
        assert Counter(rank.of_two_calls[0]) == Counter({name: 2 * count for name, count in due_of(2).items()})
        doubled = {name: 2 * gradient for name, gradient in due.gradients.items()}
        assert find_worst_difference(rank.of_two_calls[1], doubled) <= 1e-10


@pytest.mark.parametrize("layout", ["copies", "shards, once"])
def test_a_failed_pass_leaves_nothing_of_its_sums(quad: World, models: dict[str, str], layout: str) -> None:
    """It fails in its second micro-batch, on every rank; after `zero_grad` a whole pass gives what it gives at first, bit for bit."""
    for first, again in quad.run(fail_and_go_on, models["qwen3-tied"], LAYOUTS[layout][0]):
        assert first.keys() == again.keys()
        assert all((first[name] == again[name]).all() for name in first)
