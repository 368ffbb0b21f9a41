"""Corners of the columns that random batches do not reach: limits of number types, counts at zero, messages to the letter."""

import pickle

import numpy as np
import pyarrow as pa
import pytest

from skyrl_engine.contracts.values import ragged
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MiniBatchPlan, one_sample_per_row
from skyrl_engine.contracts.values.ragged import BLOCK, LONG, Ragged, RaggedView, offsets_of, segment_indices, take_segments
from skyrl_engine.errors import DataError

SMALLEST = -(2**63)


def test_no_rows_keep_their_dtype():
    assert Ragged.from_list([], np.int32).values.dtype == np.int32
    assert Ragged.from_list([], np.float32).values.shape == (0,)


def test_the_smallest_int64_is_a_negative_id_and_not_one_of_too_many_bits():
    with pytest.raises(DataError, match=r"negative token id -9223372036854775808 at position 1"):
        SampleColumns.from_lists(input_ids=[np.array([1, SMALLEST])])


def test_float64_beyond_float32_becomes_infinite_without_a_warning():
    columns = SampleColumns.from_lists(input_ids=[[1, 2]], columns={"rewards": [np.array([1e300, -1e300])]})
    assert columns.columns["rewards"].tolist() == [float("inf"), float("-inf")]


def test_no_response_token_is_no_negative_number():
    columns = SampleColumns.from_lists(input_ids=[[1], [2, 3]], num_actions=[0, 1])
    assert columns.lengths.actions.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"^sample 2 has a negative number in num_actions\. Give"):
        SampleColumns.from_lists(input_ids=[[1], [2], [3]], num_actions=[0, 1, -1])


def test_a_missing_row_is_called_missing():
    with pytest.raises(DataError, match=r"^sample 1 has something in input_ids that cannot be read: it is missing\. Give"):
        SampleColumns.from_lists(input_ids=[[1], None])


def test_each_mini_batch_of_a_plan_keeps_its_layout():
    layout = Layout(dp=2)
    rank = (one_sample_per_row(np.array([0]), 1, 0),)
    plan = BatchPlan((MiniBatchPlan((rank, rank)),), layout, np.array([7]))
    assert [part.layout for part in plan] == [layout]


def test_taking_samples_keeps_everything_that_belongs_to_them():
    columns = SampleColumns.from_lists(
        input_ids=[[1, 2], [3, 4, 5], [6]],
        num_actions=[1, 2, 0],
        columns={"rewards": [[0.5], [1.5, 2.5], []], "advantages": [[-0.5], [-1.5, -2.5], []]},
        sample_values={"score": np.array([10.0, 20.0, 30.0])},
        sample_ids=np.array([7, 8, 9]),
        group_ids=np.array([1, 2, 1]),
        unit_ids=np.array([4, 4, 5]),
        extras={"expert_routes": [np.full((tokens, 1, 2), sample, dtype=np.uint8) for sample, tokens in enumerate((2, 3, 1))]},
    )
    taken = columns.take([2, 1])
    assert taken.sample_values["score"].tolist() == [30.0, 20.0]
    assert (taken.sample_ids.tolist(), taken.group_ids.tolist(), taken.unit_ids.tolist()) == ([9, 8], [1, 2], [5, 4])
    assert taken.extras["expert_routes"][0].tolist() == [[[2, 2]]]
    assert taken.extras["expert_routes"][1].tolist() == [[[1, 1]]] * 3
    assert {name: values.tolist() for name, values in taken.columns.items()} == {"rewards": [1.5, 2.5], "advantages": [-1.5, -2.5]}
    assert taken.grouped
    assert taken.unscored_first_tokens == 0
    assert not SampleColumns.from_lists(input_ids=[[1], [2]]).take([0]).grouped


@pytest.mark.parametrize("long", [LONG, 4 * BLOCK])
def test_more_values_than_one_block_are_taken_as_indexing_does(monkeypatch, long):
    """Blocks bound the memory of the index; samples of more and of less than a block, none at all, and some twice."""
    monkeypatch.setattr(ragged, "LONG", long)
    lengths = [0, 3, 2 * BLOCK + 5, 1, 0, BLOCK // 2, BLOCK // 2, 7]
    offsets = offsets_of(lengths)
    values = np.arange(offsets[-1] * 2, dtype=np.int64).reshape(-1, 2)
    for chosen in ([7, 2, 2, 0, 6, 5, 4, 1, 3], [2], [0, 4], [], [5, 6, 5, 6]):
        segments = np.array(chosen, dtype=np.int64)
        (first, second), own = take_segments([values, values[:, 0]], offsets, segments)
        places = segment_indices(offsets, segments)
        assert np.array_equal(first, values[places])
        assert np.array_equal(second, values[places, 0])
        assert own.tolist() == offsets_of([lengths[number] for number in chosen]).tolist()


def test_dense_tokens_count_the_padding():
    rank = (one_sample_per_row(np.array([0, 1]), 5, 0), one_sample_per_row(np.array([2]), 3, 0))
    assert rank[0].dense_tokens == 10
    assert BatchPlan((MiniBatchPlan((rank,)), MiniBatchPlan((rank[1:],))), Layout(), np.arange(3)).dense_tokens == 16


@pytest.mark.parametrize(
    ("values", "offsets", "words"),
    [
        (3, np.array([0, 3], dtype=np.int32), "offsets must be int64"),
        (3, np.array([[0, 3]]), "offsets must be a vector"),
        (0, np.zeros(0, dtype=np.int64), r"offsets must be \[N\+1\]"),
        (3, np.array([1, 3]), "offsets must start at 0"),
        (3, np.array([0, 2]), "offsets must end at the number of values"),
    ],
)
def test_offsets_that_are_none(values, offsets, words):
    with pytest.raises(AssertionError, match=f"^{words}"):
        Ragged(np.zeros(values), offsets)


@pytest.mark.parametrize(
    ("starts", "lengths", "words"),
    [
        (np.array([0], dtype=np.int32), np.array([1]), "starts and lengths must be int64"),
        (np.array([0]), np.array([1], dtype=np.int32), "starts and lengths must be int64"),
        (np.array([0, 1]), np.array([1]), r"starts and lengths must be \[N\]"),
        (np.array([-1]), np.array([1]), "samples must not begin before their values"),
        (np.array([0]), np.array([-1]), "lengths must not be negative"),
        (np.array([0, 2]), np.array([1, 2]), "samples must not reach beyond their values"),
    ],
)
def test_views_that_leave_their_values(starts, lengths, words):
    with pytest.raises(AssertionError, match=f"^{words}"):
        RaggedView(np.zeros(3), starts, lengths)
    view = RaggedView(np.zeros(3), np.array([0, 3]), np.array([3, 0]))
    assert len(view) == 2
    assert len(view.take([])) == 0


class Recorder:
    """A reader that reads nothing, as one does that meets something unknown; it remembers what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, rows, dtype):
        self.asked.append((rows, np.dtype(dtype).name))


def test_a_reader_is_asked_for_every_field_that_comes_in_lists():
    reader = Recorder()
    arguments = {"loss_mask": [[1], [0.5]], "columns": {"rewards": [[0.5], [1.5]]}}
    read = SampleColumns.from_lists(input_ids=[[1, 2], [3, 4]], num_actions=[1, 1], reader=reader, **arguments)
    requests = {(str(rows), name) for rows, name in reader.asked}
    assert {("[[1, 2], [3, 4]]", "int32"), ("[[1], [0.5]]", "uint8"), ("[[0.5], [1.5]]", "float32")} <= requests
    plain = SampleColumns.from_lists(input_ids=[[1, 2], [3, 4]], num_actions=[1, 1], **arguments)
    assert read.input_ids.tolist() == plain.input_ids.tolist()
    reader = Recorder()
    SampleColumns.from_rollouts(
        prompts=[[1], [2]],
        responses=[[3], [4]],
        rewards=[[0.5], [1.5]],
        loss_masks=[[1], [0.5]],
        logprobs=[[2.5], [3.5]],
        columns={"advantages": [[4.5], [5.5]]},
        reader=reader,
    )
    requests = {(str(rows), name) for rows, name in reader.asked}
    assert ("[[1], [3], [2], [4]]", "int32") in requests
    assert ("[[1], [0.5]]", "uint8") in requests
    for rows in ([[0.5], [1.5]], [[2.5], [3.5]], [[4.5], [5.5]]):
        assert (str(rows), "float32") in requests


def test_samples_side_by_side_travel_as_one_slice_and_are_not_copied_on_arrival():
    """Also where a sample without values, which is elsewhere, comes between them."""
    values = np.arange(12, dtype=np.int32).reshape(6, 2)
    view = RaggedView(values, np.array([1, 0, 3]), np.array([2, 0, 2]))
    buffers = []
    pickled = pickle.dumps(view, protocol=5, buffer_callback=buffers.append)
    large = [buffer for buffer in buffers if np.shares_memory(np.frombuffer(buffer.raw(), dtype=np.uint8), values)]
    assert [buffer.raw().nbytes for buffer in large] == [32]
    arrived = pickle.loads(pickled, buffers=buffers)
    assert np.shares_memory(arrived.values, values)
    assert [arrived[sample].tolist() for sample in range(3)] == [[[2, 3], [4, 5]], [], [[6, 7], [8, 9]]]


@pytest.mark.parametrize(("order", "slices"), [([0, 1, 2, 3], 1), ([0, 2, 1], 3), ([2, 3, 0, 1], 2), ([1, 0], 2), ([1, 1, 2], 2)])
def test_samples_in_any_order_arrive_in_it(order, slices):
    """Only neighbours in that order are one slice."""
    values = np.arange(40, dtype=np.int32).reshape(10, 4)
    view = RaggedView.of(Ragged(values, offsets_of([1, 2, 3, 4])))
    buffers = []
    pickled = pickle.dumps(view.take(order), protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(pickled, buffers=buffers)
    assert [arrived[place].tolist() for place in range(len(order))] == [view[sample].tolist() for sample in order]
    large = [buffer for buffer in buffers if np.shares_memory(np.frombuffer(buffer.raw(), dtype=np.uint8), values)]
    assert len(large) == slices


def test_extras_may_be_given_beside_an_arrow_table():
    table = pa.table({"input_ids": pa.array([[1, 2], [3]], type=pa.list_(pa.int32()))})
    routes = [np.full((tokens, 1, 2), tokens, dtype=np.uint8) for tokens in (2, 1)]
    columns = SampleColumns.from_arrow(table, extras={"expert_routes": routes})
    assert columns.extras["expert_routes"][1].tolist() == [[[1, 1]]]
    assert not SampleColumns.from_arrow(table).extras
