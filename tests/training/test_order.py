"""The sample order: every sample once an epoch, the same from any position, and pinned so that old checkpoints keep their meaning."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.training.order import Position, SampleOrder

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
