"""Batches are cut between groups, for any sizes of groups and any number of ranks, and reordered by whole groups."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.training.rl.batches import group_sizes, mini_batch_size, shuffle_groups
from skyrl_engine_collators.padded.collator import PaddedCollator

sizes = st.lists(st.integers(1, 7), min_size=1, max_size=9)


def columns_of(sizes: list[int]) -> SampleColumns:
    count = sum(sizes)
    return SampleColumns.from_rollouts(
        prompts=[[1, 2]] * count,
        responses=[[3 + number % 5] * (1 + number % 4) for number in range(count)],
        columns={},
        group_ids=np.repeat(np.arange(len(sizes)) * 7, sizes),
    )


def cuts(sizes: list[int], limit: int) -> int:
    """Count the mini-batches of whole groups, in their order, with at most `limit` samples each."""
    parts, filled = 1, 0
    for size in sizes:
        if filled and filled + size > limit:
            parts, filled = parts + 1, 0
        filled += size
    return parts


@given(sizes, st.integers(1, 9))
def test_the_size_is_the_smallest_that_makes_at_most_so_many_parts(sizes: list[int], parts: int) -> None:
    size = mini_batch_size(sizes, parts)
    assert size >= max(sizes)
    assert cuts(sizes, size) <= parts
    assert size == max(sizes) or cuts(sizes, size - 1) > parts


def test_equal_groups_make_equal_parts() -> None:
    assert mini_batch_size([4] * 8, 4) == 8
    assert mini_batch_size([4] * 8, 1) == 32
    assert mini_batch_size([4] * 8, 8) == 4


@given(sizes, st.integers(1, 4), st.integers(1, 3))
def test_mini_batches_hold_whole_groups_on_any_number_of_ranks(sizes: list[int], parts: int, ranks: int) -> None:
    columns = columns_of(sizes)
    assert group_sizes(columns) == sizes
    layout = Layout(dp=ranks, micro_batch_rows=2, mini_batch_size=mini_batch_size(sizes, parts))
    plan = PaddedCollator().plan(columns.lengths, layout)
    assert 1 <= len(plan.mini_batches) <= parts
    found = [columns.group_ids[mini_batch.samples].tolist() for mini_batch in plan.mini_batches]
    for place, own in enumerate(found):
        assert not set(own) & {other for rest in found[place + 1 :] for other in rest}
    assert sorted(sample for mini_batch in plan.mini_batches for sample in mini_batch.samples) == list(range(sum(sizes))), (
        "none is lost"
    )


@given(sizes, st.integers(0, 5))
def test_another_order_keeps_groups_together(sizes: list[int], epoch: int) -> None:
    columns = columns_of(sizes)
    order = shuffle_groups(columns, seed=1, step=2, epoch=epoch)
    assert sorted(order.tolist()) == list(range(len(columns)))
    moved = columns.take(order)
    assert sorted(group_sizes(moved)) == sorted(sizes)
    assert len(np.flatnonzero(np.diff(moved.group_ids))) == len(sizes) - 1
    for group in np.unique(columns.group_ids):
        own = order[moved.group_ids == group]
        assert (np.diff(own) == 1).all(), "members stay in their order"


def test_the_order_follows_from_seed_step_and_epoch() -> None:
    columns = columns_of([1] * 12)
    orders = {
        tuple(shuffle_groups(columns, seed=seed, step=step, epoch=epoch)) for seed in (1, 2) for step in (1, 2) for epoch in (1, 2)
    }
    assert len(orders) == 8
    assert tuple(shuffle_groups(columns, seed=1, step=1, epoch=1)) in orders
