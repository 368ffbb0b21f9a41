"""Columns from Arrow: its own memory where possible, the same values as from lists, and errors that name the sample."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.errors import DataError
from skyrl_engine.testing.collators.strategies import SampleLists, sample_lists


def table_of(lists: SampleLists, list_type=pa.list_) -> pa.Table:
    tokens = [[*prompt, *response] for prompt, response in zip(lists.prompts, lists.responses, strict=True)]
    arrays = {
        "input_ids": pa.array(tokens, type=list_type(pa.int64())),
        "num_actions": pa.array([len(response) for response in lists.responses], type=pa.int32()),
        "loss_mask": pa.array(lists.loss_masks, type=list_type(pa.float32())),
        "sample_ids": pa.array(lists.sample_ids, type=pa.int64()),
        "group_ids": pa.array(lists.group_ids, type=pa.int64()),
        "unit_ids": pa.array(lists.unit_ids, type=pa.int64()),
        **{name: pa.array(rows, type=list_type(pa.float32())) for name, rows in lists.columns.items()},
        **{name: nested(name, arrays, list_type) for name, arrays in lists.extras.items()},
    }
    return pa.table(arrays)


def nested(name, arrays, list_type) -> pa.Array:
    """Lists of lists; grids in lists of fixed size, routes as 16 bits where they fit."""
    inner = {
        "expert_routes": list_type(list_type(pa.int64())),
        "pixel_values": list_type(pa.float32()),
        "image_grid_thw": pa.list_(pa.int64(), 3),
        "mm_token_type_ids": pa.int16(),
    }
    return pa.array([None if array is None else array.tolist() for array in arrays], type=list_type(inner[name]))


@settings(deadline=None)
@given(
    sample_lists(carries=("router_replay", "vision")),
    st.sampled_from([pa.list_, pa.large_list]),
    st.integers(0, 3),
    st.booleans(),
)
def test_any_chunking_gives_what_the_lists_give(lists: SampleLists, list_type, cut, from_batch):
    """Chunks, slices whose offsets do not start at 0, both offset widths."""
    table = table_of(lists, list_type)
    pieces = pa.concat_tables([table.slice(0, 1), table, table.slice(cut)]).slice(1, len(table))
    data = pieces.combine_chunks().to_batches()[0] if from_batch else pieces
    columns = SampleColumns.from_arrow(data, columns=list(lists.columns))
    expected = lists.to_columns()
    for name in ("input_ids", "token_offsets", "action_offsets", "sample_ids", "group_ids", "unit_ids"):
        assert np.array_equal(getattr(columns, name), getattr(expected, name)), name
    assert columns.loss_weight.astype(np.float32).tobytes() == expected.loss_weight.astype(np.float32).tobytes()
    for name in lists.columns:
        assert columns.columns[name].tobytes() == expected.columns[name].tobytes(), name
    assert columns.extras.keys() == expected.extras.keys()
    for name, view in expected.extras.items():
        found = columns.extras[name]
        assert found.values.dtype == view.values.dtype
        assert found.values.shape[1:] == view.values.shape[1:]
        for sample in range(len(view)):  # values, since a NaN's payload does not outlive a Python list
            np.testing.assert_array_equal(found[sample], view[sample])


def test_nested_lists_of_one_chunk_are_not_copied():
    routes = pa.array([[[[1, 2]], [[3, 4]]], [[[5, 6]]]], type=pa.list_(pa.list_(pa.list_(pa.uint8()))))
    table = pa.table({"input_ids": pa.array([[1, 2], [3]], type=pa.list_(pa.int32())), "expert_routes": routes}).slice(1)
    view = SampleColumns.from_arrow(table).extras["expert_routes"]
    assert view[0].tolist() == [[[5, 6]]]
    assert view.values.ctypes.data == routes.flatten().flatten().flatten().buffers()[1].address + 4


@pytest.mark.parametrize("kind", [pa.null(), pa.list_(pa.list_(pa.float32()))])
def test_images_that_nobody_has_are_left_out(kind):
    nobody = pa.array([None, None], type=kind)
    extras = dict.fromkeys(("pixel_values", "image_grid_thw"), nobody)
    assert SampleColumns.from_arrow(pa.table({"input_ids": [[1, 2], [3]], **extras})).extras == {}


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ([[[[1, 2]]], [[[1]]]], "sample 1 has lists of different lengths in expert_routes"),
        ([[[[1, 2]], [[3, 4], [5, 6]]], [[[1, 2]]]], "sample 0 has lists of different lengths in expert_routes"),
        ([[[[1, 2]]], [None]], "sample 1 has lists of different lengths in expert_routes"),
        ([[[[1, 2]]], [[[1, None]]]], "sample 1 has an empty value in expert_routes"),
        ([[[[1, 2]]], None], "sample 1 has expert routes for 0 of 1 tokens"),
        ([None, None], "sample 0 has expert routes of shape"),
        ([[1], [2]], "sample 0 has expert routes of shape"),
        ([1, 2], "column 'expert_routes' holds int64, not lists"),
    ],
    ids=str,
)
def test_routes_of_no_shape_are_refused(routes, words):
    table = pa.table({"input_ids": [[1, 2], [3]], "expert_routes": routes})
    with pytest.raises(DataError, match=words):
        SampleColumns.from_arrow(table)


@pytest.mark.parametrize("dtype", [pa.int32(), pa.int64()])
def test_one_chunk_is_not_copied(dtype):
    tokens = pa.array([[1, 2, 3], [4, 5], [6]], type=pa.list_(dtype))
    mask = pa.array([[0, 1], [1], []], type=pa.list_(pa.uint8()))
    rewards = pa.array([[0.5, 1.5], [2.5], []], type=pa.list_(pa.float32()))
    table = pa.table({"input_ids": tokens, "loss_mask": mask, "rewards": rewards}).slice(1)
    columns = SampleColumns.from_arrow(table, columns=["rewards"])
    assert columns.input_ids.tolist() == [4, 5, 6]
    assert columns.input_ids.ctypes.data == tokens.values.buffers()[1].address + 3 * dtype.bit_width // 8
    assert columns.loss_weight.ctypes.data == mask.values.buffers()[1].address + 2
    assert columns.columns["rewards"].ctypes.data == rewards.values.buffers()[1].address + 2 * 4
    weighted = SampleColumns.from_arrow(pa.table({"input_ids": tokens, "loss_mask": rewards}))
    assert weighted.loss_weight.ctypes.data == rewards.values.buffers()[1].address


def test_a_list_array_alone_and_a_mapping():
    tokens = pa.array([[1, 2, 3], [4]], type=pa.list_(pa.int32()))
    assert SampleColumns.from_arrow(tokens).lengths.actions.tolist() == [3, 1]
    mapping = {"input_ids": pa.chunked_array([tokens]), "num_actions": pa.array([1, 0], type=pa.uint8())}
    assert SampleColumns.from_arrow(mapping).lengths.actions.tolist() == [1, 0]


def test_other_types_are_read():
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2, 3], [4, 5, 6]], type=pa.list_(pa.uint16(), 3)),
            "loss_mask": pa.array([[True, False], [True, True]], type=pa.list_(pa.bool_())),
            "advantages": pa.array([[1.5, -0.0], [2.0, 1e300]], type=pa.list_(pa.float64())),
            "difficulty": pa.array([0.1, 0.9]),
        }
    )
    columns = SampleColumns.from_arrow(table, columns=["advantages"], sample_values=["difficulty"])
    assert columns.input_ids.dtype == np.int32
    assert columns.loss_weight.dtype == np.uint8
    assert columns.loss_weight.tolist() == [1, 0, 1, 1]
    assert columns.columns["advantages"].tolist() == [1.5, 0.0, 2.0, float("inf")]
    assert columns.sample_values["difficulty"].tolist() == [0.1, 0.9]


def test_a_table_without_rows_and_without_chunks():
    schema = pa.schema({"input_ids": pa.list_(pa.int32())})
    assert len(SampleColumns.from_arrow(schema.empty_table())) == 0
    assert len(SampleColumns.from_arrow(pa.chunked_array([], type=pa.list_(pa.int32())))) == 0


def test_a_hugging_face_dataset_in_arrow_format():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4, 5]], "num_actions": [1, 2]})
    columns = SampleColumns.from_arrow(dataset.with_format("arrow")[:])
    assert columns.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert columns.lengths.actions.tolist() == [1, 2]


TOKENS = pa.array([[1, 2], [3, 4]], type=pa.list_(pa.int32()))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"tokens": TOKENS}, ["no column 'input_ids'", "tokens"]),
        ({"input_ids": pa.array([1, 2])}, ["input_ids", "not lists"]),
        ({"input_ids": pa.array([[1, 2], None], type=pa.list_(pa.int32()))}, ["sample 1 has no input_ids"]),
        ({"input_ids": pa.array([[1, 2], [3], [4, None]], type=pa.list_(pa.int32()))}, ["sample 2", "empty value", "input_ids"]),
        ({"input_ids": pa.array([[1, 2], [3.5]])}, ["input_ids", "float64"]),
        ({"input_ids": pa.array([[2**63]], type=pa.list_(pa.uint64()))}, ["64 bits"]),
        ({"input_ids": TOKENS, "loss_mask": pa.array([[1], [1, 1]]), "num_actions": pa.array([1, 1])}, ["sample 1", "loss_mask"]),
        ({"input_ids": TOKENS, "loss_mask": pa.array([["a"], ["b"]])}, ["loss_mask", "not numbers"]),
        ({"input_ids": TOKENS, "num_actions": pa.array([1, None])}, ["sample 1 has no num_actions"]),
        ({"input_ids": TOKENS, "num_actions": pa.array([1, -1])}, ["sample 1", "negative"]),
        ({"input_ids": TOKENS, "rewards": pa.array([["a"], ["b"]])}, ["'rewards'", "not numbers"]),
        ({"input_ids": TOKENS, "rewards": pa.array([[1.0], [1.0, 2.0]])}, ["sample 0", "rewards"]),
        ([[1, 2]], ["list", "Arrow table"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and isinstance(value[0], str) else "",
)
def test_errors(table, words):
    wanted = ["rewards"] if "rewards" in table else []
    with pytest.raises(DataError) as caught:
        SampleColumns.from_arrow(table, columns=wanted)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.remedy
