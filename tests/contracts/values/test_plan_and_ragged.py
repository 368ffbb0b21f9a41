"""Plans, ragged values and reusable memory."""

from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.values import ragged as ragged_module
from skyrl_engine.contracts.values.plan import BatchPlan, BuildOrder, Layout, MicroBatchPlan, MiniBatchPlan, one_sample_per_row
from skyrl_engine.contracts.values.ragged import Ragged, join_segments, offsets_of, segment_indices, take_segments


def rows_of(*samples):
    return one_sample_per_row(np.array(samples, dtype=np.int64), 4, 2)


def test_order_of_samples_in_a_plan():
    first = MiniBatchPlan(((rows_of(4, 1), rows_of(5)), (rows_of(0), rows_of())))
    second = MiniBatchPlan(((rows_of(2),), (rows_of(3),)))
    plan = BatchPlan((first, second), Layout(dp=2), np.array([10, 11, 12, 13, 14, 15]))
    assert first.rank_samples(0).tolist() == [4, 1, 5]
    assert first.samples.tolist() == [4, 1, 5, 0]
    assert plan.expected_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert [part.expected_ids.tolist() for part in plan] == [[10, 11, 14, 15], [12, 13]]
    assert BatchPlan((), Layout(), np.array([7])).expected_ids.tolist() == []


def test_renumbering_keeps_the_rows():
    micro_batch = rows_of(4, 1)
    local = micro_batch.renumber(np.array([0, 1]))
    assert local.samples.tolist() == [0, 1]
    assert (local.rows, local.width, local.action_width) == (2, 4, 2)


def test_a_micro_batch_knows_those_that_are_built_after_it_and_a_changed_copy_does_not():
    micro_batches = [rows_of(4, 1), rows_of(5), rows_of()]
    ordered = BuildOrder.of(micro_batches)
    assert [micro_batch.samples.tolist() for micro_batch in ordered] == [[4, 1], [5], []]
    assert [micro_batch.following for micro_batch in ordered] == [ordered[1:], ordered[2:], ()]
    assert all(micro_batch.following == () for micro_batch in micro_batches)
    assert evolve(ordered[0], width=9).following == ()
    local = ordered[0].renumber(np.array([0, 1]))
    assert local.order is None
    assert MicroBatchPlan(local.samples, local.row_offsets, 4, 2, order=ordered[0].order, place=3).following == ()


@pytest.mark.parametrize("changes", [{"dp": 0}, {"mini_batch_size": 0}, {"micro_batch_rows": -1}])
def test_a_layout_checks_its_numbers(changes):
    with pytest.raises(ValueError):
        Layout(**changes)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6), st.data())
def test_ragged_is_a_list_of_rows(rows, data):
    ragged = Ragged.from_list(rows, np.int32)
    assert [ragged[i].tolist() for i in range(len(ragged))] == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1))) if rows else []
    taken = ragged.take(chosen)
    assert [taken[i].tolist() for i in range(len(taken))] == [rows[i] for i in chosen]
    joined = Ragged.concat([ragged, taken])
    assert [joined[i].tolist() for i in range(len(joined))] == rows + [rows[i] for i in chosen]
    indices = segment_indices(ragged.offsets, np.array(chosen, dtype=np.int64))
    assert ragged.values[indices].tolist() == taken.values.tolist()


blocks = pytest.mark.parametrize("block", [1, 3, 1 << 16])
"""Values of a block: fewer than a segment has, more than some have, more than there are."""


def arrays_of(total):
    """A vector and a matrix of different types."""
    return [np.arange(total, dtype=np.float32), np.arange(2 * total, dtype=np.int32).reshape(total, 2)]


@blocks
@pytest.mark.parametrize("long", [0, 2, 256])
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), segments=st.lists(st.integers(0, 5), max_size=8))
def test_segments_are_taken_from_several_arrays(block, long, lengths, segments):
    """Against one index per value; a segment may be taken twice. Whether they count as `long` changes nothing."""
    offsets = offsets_of(lengths)
    segments = np.array([segment for segment in segments if segment < len(lengths)], dtype=np.int64)
    arrays = arrays_of(int(offsets[-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_module, "BLOCK", block)
        patch.setattr(ragged_module, "WINDOWED_BLOCK", block)
        patch.setattr(ragged_module, "LONG", long)
        taken, chosen = take_segments(arrays, offsets, segments)
    for values, wanted in zip(taken, arrays, strict=True):
        np.testing.assert_array_equal(values, wanted[segment_indices(offsets, segments)], strict=True)
    assert chosen.tolist() == offsets_of(np.diff(offsets)[segments]).tolist()


@blocks
@pytest.mark.parametrize("long", [0.25, 0.5, 512])
@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=5), st.data())
def test_segments_of_several_parts_are_joined_in_any_order(block, long, lengths, data):
    """Against joining the parts first, and one index per value; some segments are dropped, and some, all or none count as long."""
    flat = [length for part in lengths for length in part]
    order = data.draw(st.permutations(range(len(flat))))[: data.draw(st.integers(0, len(flat)))]
    order = np.array(order, dtype=np.int64)
    total = sum(flat)
    arrays = [
        np.arange(total, dtype=np.float32),
        np.arange(total, dtype=np.int32)[::-1],
        np.arange(total) % 2 == 0,
        np.arange(total, dtype=np.float64),
        np.arange(total) * 1j,
    ]
    bounds = offsets_of([sum(part) for part in lengths])
    parts = [[values[first:last] for values in arrays] for first, last in pairwise(bounds)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_module, "BLOCK", block)
        patch.setattr(ragged_module, "WINDOWED_BLOCK", block)
        patch.setattr(ragged_module, "LONG_JOINED", long)
        patch.setattr(ragged_module, "WINDOWS", (3, 2, 1))
        joined, offsets = join_segments(parts, [offsets_of(part) for part in lengths], order)
    for values, wanted in zip(joined, arrays, strict=True):
        np.testing.assert_array_equal(values, wanted[segment_indices(offsets_of(flat), order)], strict=True)
    assert offsets.tolist() == offsets_of(np.array(flat, dtype=np.int64)[order]).tolist()


def test_ragged_refuses_offsets_that_do_not_fit():
    with pytest.raises(AssertionError):
        Ragged(np.zeros(3), offsets_of([2]))


def test_a_plan_joined_has_the_rows_of_its_micro_batches_in_their_order():
    def rows(samples, offsets, width, action_width):
        return MicroBatchPlan(np.array(samples, dtype=np.int64), np.array(offsets), width, action_width, alignment=2)

    first = MiniBatchPlan(
        ((rows([4, 1], [0, 2], 6, 5), rows([], [0, 0], 2, 1)), (rows([0], [0, 1], 8, 2), rows([5], [0, 1], 4, 3)))
    )
    second = MiniBatchPlan(((rows([2, 3], [0, 1, 2], 2, 7),), (rows([], [0, 0], 2, 1),)))
    joined = BatchPlan((first, second), Layout(dp=2), np.arange(6)).joined
    assert joined.samples.tolist() == [4, 1, 0, 5, 2, 3]
    assert joined.row_offsets.tolist() == [0, 2, 2, 3, 4, 5, 6, 6]
    assert (joined.width, joined.action_width, joined.alignment) == (8, 7, 2)
    nothing = BatchPlan((), Layout(), np.arange(0)).joined
    assert (nothing.rows, nothing.width, nothing.action_width, nothing.alignment) == (0, 1, 0, 1)
    assert (nothing.samples.dtype, nothing.row_offsets.dtype) == (np.int64, np.int64)
