"""Plans, ragged values and reusable memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.buffers import ReusableBuffers
from skyrl_engine.contracts.plan import BatchPlan, Layout, MiniBatchPlan, one_sample_per_row
from skyrl_engine.contracts.ragged import Ragged, offsets_of, segment_indices


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
    local = micro_batch.renumbered(np.array([0, 1]))
    assert local.samples.tolist() == [0, 1]
    assert (local.rows, local.width, local.action_width) == (2, 4, 2)


@pytest.mark.parametrize("changes", [{"dp": 0}, {"mini_batch_size": 0}, {"micro_batch_rows": -1}, {"width": "other"}])
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


def test_ragged_refuses_offsets_that_do_not_fit():
    with pytest.raises(AssertionError):
        Ragged(np.zeros(3), offsets_of([2]))


def test_reusable_memory_comes_back_after_its_generations():
    buffers = ReusableBuffers(generations=2)
    first = buffers.empty("input_ids", (2, 3), "int64")
    first[:] = 1
    second = buffers.empty("input_ids", (2, 3), "int64")
    second[:] = 2
    assert (first == 1).all(), "the batch before is still whole"
    other = buffers.empty("loss_weight", (2, 3), "float32")
    other[:] = 5
    third = buffers.empty("input_ids", (1, 2), "int64")
    assert third.ctypes.data == first.ctypes.data
    assert third.shape == (1, 2)
    assert third.flags.c_contiguous
    grown = buffers.empty("input_ids", (9, 9), "int64")
    grown[:] = 3
    assert (second == 2).all(), "growing gives new memory"
    assert buffers.empty("nothing", (3, 0), "float32").shape == (3, 0)
