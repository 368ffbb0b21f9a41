"""The sample order: every sample once an epoch, the same from any position, and pinned so that old checkpoints keep their meaning."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.errors import DataError
from skyrl_engine.training.sft.order import Position, SampleOrder

orders = st.builds(
    SampleOrder,
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 25),
    seed=st.integers(0, 2**32),
    shuffle=st.booleans(),
)


def walk(order: SampleOrder, position: Position, steps: int) -> tuple[list[list[int]], Position]:
    batches = []
    for _ in range(steps):
        chosen, position = order.mini_batch(position)
        batches.append(chosen.tolist())
    return batches, position


@settings(deadline=None)
@given(orders, st.integers(1, 3))
def test_an_epoch_holds_every_sample_once_and_only_its_last_mini_batch_is_smaller(order: SampleOrder, epochs: int) -> None:
    position = order.start()
    for epoch in range(epochs):
        assert position == Position(epoch, 0)
        batches, position = walk(order, position, order.steps_per_epoch)
        assert sorted(sample for batch in batches for sample in batch) == list(range(order.samples))
        assert all(len(batch) == order.batch_size for batch in batches[:-1])
        assert 1 <= len(batches[-1]) <= order.batch_size
    assert position == Position(epochs, 0)


@settings(deadline=None)
@given(orders, st.integers(0, 20), st.integers(0, 20))
def test_going_on_from_a_position_equals_never_having_stopped(order: SampleOrder, before: int, after: int) -> None:
    whole, end = walk(order, order.start(), before + after)
    first, position = walk(order, order.start(), before)
    # What a resume has is the position alone: a new order object, and no draw made before.
    resumed = SampleOrder(order.samples, order.batch_size, order.seed, order.shuffle)
    second, resumed_end = walk(resumed, Position(position.epoch, position.offset), after)
    assert whole == first + second
    assert end == resumed_end


def test_epochs_and_seeds_differ_and_the_order_is_pinned() -> None:
    order = SampleOrder(samples=8, batch_size=3, seed=7)
    assert order.epoch(0).tolist() == [6, 3, 4, 0, 2, 7, 5, 1]
    assert order.epoch(0).tolist() != order.epoch(1).tolist()
    assert order.epoch(0).tolist() != SampleOrder(samples=8, batch_size=3, seed=8).epoch(0).tolist()
    assert order.epoch(0).dtype == np.int64


def test_without_shuffling_the_data_keeps_its_order() -> None:
    order = SampleOrder(samples=5, batch_size=2, shuffle=False)
    assert walk(order, order.start(), 4)[0] == [[0, 1], [2, 3], [4], [0, 1]]


def test_steps_of_whole_and_partial_epochs() -> None:
    order = SampleOrder(samples=10, batch_size=4)
    assert [order.steps_in(epochs) for epochs in (1, 2, 0.5, 1.5, 0.001, 0.1)] == [3, 6, 2, 5, 1, 1]


def columns(group_ids: list[int], unit_ids: list[int] | None = None) -> SampleColumns:
    ones = np.ones(len(group_ids), dtype=np.int64)
    return SampleColumns.create(
        input_ids=np.ones(2 * len(group_ids), dtype=np.int32),
        token_offsets=offsets_of(2 * ones),
        action_offsets=offsets_of(ones),
        group_ids=np.asarray(group_ids, dtype=np.int64),
        unit_ids=None if unit_ids is None else np.asarray(unit_ids, dtype=np.int64),
    )


@st.composite
def draw_groups(draw: st.DrawFn) -> tuple[list[int], SampleOrder]:
    group_ids = draw(st.lists(st.integers(0, 12), min_size=1, max_size=50))
    largest = max(group_ids.count(group) for group in group_ids)
    size = draw(st.integers(largest, largest + 8))
    return group_ids, SampleOrder.of(
        columns(group_ids), batch_size=size, seed=draw(st.integers(0, 99)), shuffle=draw(st.booleans())
    )


@settings(deadline=None)
@given(draw_groups(), st.integers(1, 2))
def test_groups_stay_whole_and_steps_stay_as_many(drawn: tuple[list[int], SampleOrder], epochs: int) -> None:
    """For groups of any size, next to each other in the data or not; every mini-batch is within one group of the batch size."""
    group_ids, order = drawn
    largest = max(group_ids.count(group) for group in group_ids)
    position = order.start()
    for epoch in range(epochs):
        assert position == Position(epoch, 0)
        batches, position = walk(order, position, order.steps_per_epoch)
        assert sorted(sample for batch in batches for sample in batch) == list(range(len(group_ids)))
        groups = [{group_ids[sample] for sample in batch} for batch in batches]
        assert sum(map(len, groups)) == len(set(group_ids)), "a group is in two mini-batches"
        assert all(1 <= len(batch) < order.batch_size + largest for batch in batches)
    assert position == Position(epochs, 0)


@settings(deadline=None)
@given(draw_groups(), st.integers(0, 6), st.integers(0, 9))
def test_groups_stay_whole_from_any_position_and_with_another_batch_size(
    drawn: tuple[list[int], SampleOrder], before: int, more: int
) -> None:
    group_ids, order = drawn
    first, position = walk(order, order.start(), before)
    same, _ = walk(evolve(order), position, 5)
    assert first + same == walk(order, order.start(), before + 5)[0]
    if position.offset:
        rest = []
        changed = evolve(order, batch_size=order.batch_size + more)
        epoch = position.epoch
        while position.epoch == epoch:
            (batch,), position = walk(changed, position, 1)
            rest.append({group_ids[sample] for sample in batch})
        assert sum(map(len, rest)) == len(set.union(*rest))


def test_groups_of_one_size_give_mini_batches_of_one_size() -> None:
    order = SampleOrder.of(columns([number // 4 for number in range(48)]), batch_size=8, seed=1)
    assert [len(batch) for batch in walk(order, order.start(), 6)[0]] == [8] * 6
    assert SampleOrder.of(columns(list(range(5))), batch_size=2).bundles is None


def test_units_join_groups() -> None:
    order = SampleOrder.of(columns([0, 0, 1, 1, 2], unit_ids=[0, 1, 1, 2, 3]), batch_size=4, shuffle=False)
    assert walk(order, order.start(), 2)[0] == [[0, 1, 2, 3], [4]]


def test_a_group_larger_than_a_mini_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"a group of 3 samples does not fit a mini-batch of training.batch_size = 2") as caught:
        SampleOrder.of(columns([7, 8, 7, 7]), batch_size=2)
    assert caught.value.remedy == "Set training.batch_size to 3 or more"


@settings(deadline=None)
@given(orders, st.integers(1, 3))
def test_drop_last_leaves_out_the_mini_batch_that_is_not_full_and_nothing_else(order: SampleOrder, epochs: int) -> None:
    """The mini-batches that stay are those of the same order without it."""
    if order.samples < order.batch_size:
        with pytest.raises(DataError, match=rf"leaves out every mini-batch: training.batch_size is {order.batch_size}"):
            evolve(order, drop_last=True)
        return
    dropping = evolve(order, drop_last=True)
    position = dropping.start()
    for epoch in range(epochs):
        assert position == Position(epoch, 0)
        batches, position = walk(dropping, position, dropping.steps_per_epoch)
        assert batches == [
            batch for batch in walk(order, Position(epoch, 0), order.steps_per_epoch)[0] if len(batch) == order.batch_size
        ]
    assert dropping.left_out == order.samples % order.batch_size
    assert dropping.steps_in(float(epochs)) == epochs * dropping.steps_per_epoch
    assert dropping.steps_in(0.99) <= dropping.steps_per_epoch


def test_drop_last_keeps_groups_whole() -> None:
    columns = SampleColumns.create(
        input_ids=np.zeros(22, dtype=np.int32),
        token_offsets=offsets_of([2] * 11),
        action_offsets=offsets_of([1] * 11),
        group_ids=np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]),
    )
    order = SampleOrder.of(columns, batch_size=4, shuffle=False, drop_last=True)
    assert walk(order, order.start(), 3) == ([[0, 1, 2], [3, 4, 5], [0, 1, 2]], Position(1, 3))
    assert (order.steps_per_epoch, order.left_out) == (2, 5)


def test_a_resume_that_asks_for_drop_last_goes_on_with_the_next_epoch() -> None:
    order = SampleOrder(samples=10, batch_size=4, shuffle=False, drop_last=True)
    assert walk(order, Position(0, 8), 1) == ([[0, 1, 2, 3]], Position(1, 4))
