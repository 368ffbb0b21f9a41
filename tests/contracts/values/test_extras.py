"""Expert routes and images of samples: what is read, what is refused by name of the sample, and what is never copied."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import Ragged, RaggedView, offsets_of
from skyrl_engine.errors import DataError
from skyrl_engine.testing.collators.strategies import sample_lists
from skyrl_engine.testing.error_checks import check_says_what_to_do

TOKENS = [[1, 2, 3], [4], [5, 6]]
GRID = [[[1, 2, 1]], None, [[1, 1, 1], [1, 1, 2]]]
PIXELS = [np.ones((2, 4)), None, np.zeros((3, 4))]


def make_columns(routes=None, **extras):
    return SampleColumns.from_lists(input_ids=TOKENS, routes=routes, extras=extras).extras


@settings(deadline=None)
@given(sample_lists(carries=("router_replay", "vision")))
def test_every_sample_keeps_its_own(lists):
    extras = lists.to_columns().extras
    assert extras.keys() == {name for name, arrays in lists.extras.items() if any(array is not None for array in arrays)}
    for name, view in extras.items():
        assert view.values.flags.c_contiguous
        for sample, given_array in enumerate(lists.extras[name]):
            expected = np.zeros((0, *view.values.shape[1:])) if given_array is None else given_array
            assert view[sample].shape == expected.shape
            assert view[sample].astype(expected.dtype).tobytes() == expected.tobytes()
    if "expert_routes" in extras:
        largest = max(int(array.max()) for array in lists.extras["expert_routes"])
        assert extras["expert_routes"].values.dtype == ("uint8" if largest < 256 else "int16" if largest < 32768 else "int32")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_flat_values_that_fit_are_not_copied(dtype):
    values = np.full((4, 2, 2), {"uint8": 7, "int16": 300, "int32": 40_000}[dtype], dtype=dtype)
    pixels, grid = np.ones((3, 5), dtype=np.float32), np.array([[1, 1, 3]])
    types = np.zeros(6, dtype=np.int32)
    extras = make_columns(
        Ragged(values, offsets_of([2, 1, 1])),
        pixel_values=Ragged(pixels, offsets_of([0, 3, 0])),
        image_grid_thw=Ragged(grid, offsets_of([0, 1, 0])),
        mm_token_type_ids=RaggedView.of(Ragged(types, offsets_of([3, 1, 2]))),
    )
    flat = {"expert_routes": values, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}
    assert all(extras[name].values is array for name, array in flat.items())


def test_flat_values_that_are_too_wide_are_narrowed():
    extras = make_columns(Ragged(np.full((3, 1, 2), 9), offsets_of([1, 1, 1])))
    assert extras["expert_routes"].values.dtype == np.uint8


def test_tensors_are_read_on_any_dtype_of_theirs():
    extras = make_columns(
        [torch.full((1, 1, 2), 3, dtype=torch.int16)] * 3,
        pixel_values=[torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True), None, torch.zeros(3, 4, dtype=torch.float64)],
        image_grid_thw=[torch.tensor([[1, 2, 1]]), None, torch.tensor([[1, 1, 1], [1, 1, 2]])],
    )
    assert extras["expert_routes"].values.dtype == np.uint8
    assert extras["pixel_values"].values.dtype == np.float32
    assert extras["pixel_values"].lengths.tolist() == [2, 0, 3]
    assert extras["image_grid_thw"].values.tolist() == [[1, 2, 1], [1, 1, 1], [1, 1, 2]]


def test_what_no_sample_has_is_left_out():
    none = [None] * 3
    assert make_columns(None, pixel_values=none, image_grid_thw=none, mm_token_type_ids=none) == {}
    assert SampleColumns.from_lists(input_ids=[], routes=[]).extras == {}


ONE = np.zeros((1, 2, 2), dtype=np.int64)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ([ONE, ONE], "expert routes are given for 2 samples of 3"),
        ([ONE, None, ONE], "sample 1 has expert routes that cannot be read: they are missing"),
        ([ONE, ONE, [[[1, 2]], [[1]]]], "sample 2 has expert routes that cannot be read"),
        ([ONE, 5, ONE], "sample 1 has expert routes of shape"),
        ([ONE, ONE[0], ONE], r"sample 1 has expert routes of shape \[2, 2\], which is not 3 axes"),
        ([ONE, ONE + 0.5, ONE], "sample 1 has expert routes of float64, not whole numbers"),
        ([ONE, ONE == 0, ONE], "sample 1 has expert routes of bool, not whole numbers"),
        ([ONE, [[[2**70, 1]] * 2], ONE], "sample 1 has expert routes of object"),
        ([ONE, ONE[:, :1], ONE], r"sample 1 has expert routes of \[1, 2\] per row, sample 0 of \[2, 2\]"),
        ([ONE[:, :, :0]] * 3, "sample 0 has expert routes without an expert"),
        ([ONE, ONE - 1, ONE], "sample 1 has the negative expert -1"),
        ([ONE, ONE, ONE + 2**31], "sample 2 has the expert 2147483648 in its routes, more than int32 holds"),
        ([ONE, ONE[:0], ONE], "sample 1 has expert routes for 0 of 1 tokens"),
        ([ONE, np.repeat(ONE, 2, axis=0), ONE], "sample 1 has expert routes for 2 of 1 tokens"),
        (Ragged(np.zeros((4, 2, 2), np.uint8), offsets_of([1, 0, 3])), "sample 1 has expert routes for 0 of 1 tokens"),
        (Ragged(np.zeros((3, 2, 2), np.uint8), offsets_of([1, 2])), "expert routes are given for 2 samples of 3"),
        (Ragged(np.zeros((3, 2), np.uint8), offsets_of([1, 1, 1])), r"sample 0 has expert routes of shape \[1, 2\]"),
    ],
    ids=str,
)
def test_routes_that_are_refused(routes, words):
    with pytest.raises(DataError, match=words):
        make_columns(routes)


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        ({"pixel_values": PIXELS}, "samples have pixel_values without image_grid_thw"),
        ({"image_grid_thw": GRID}, "samples have image_grid_thw without pixel_values"),
        (
            {"pixel_values": [PIXELS[0], None, PIXELS[0]], "image_grid_thw": GRID},
            "sample 2 has 2 patches where its 2 image grids count 3",
        ),
        ({"pixel_values": [None, PIXELS[0], None], "image_grid_thw": [GRID[0], None, None]}, "sample 0 has 0 patches"),
        (
            {"pixel_values": [np.ones((2, 4)), np.ones((1, 3)), None]},
            r"sample 1 has pixel values of \[3\] per row, sample 0 of \[4\]",
        ),
        ({"pixel_values": [np.ones((2, 4), int), None, None]}, "sample 0 has pixel values of int64, not floats"),
        ({"image_grid_thw": [[[1, 2]], None, None]}, "sample 0 has an image grid that is not three positive numbers"),
        ({"image_grid_thw": [None, [[1, 0, 2]], None]}, "sample 1 has an image grid that is not three positive numbers"),
        ({"mm_token_type_ids": [[0, 0, 0], [0, 1], None]}, "sample 1 has 2 token types for 1 tokens"),
        ({"mm_token_type_ids": [[0, 0, -1], None, None]}, "sample 0 has a token type that is negative"),
        ({"mm_token_type_ids": [None, [2**31], None]}, "sample 1 has a token type that is negative or beyond int32"),
        ({"anything": [1, 2, 3]}, "'anything' is list, which is not ragged"),
        ({"anything": Ragged(np.zeros(2), offsets_of([2]))}, "'anything' has 1 entries for 3 samples"),
    ],
    ids=str,
)
def test_images_that_are_refused(extras, words):
    with pytest.raises(DataError, match=words):
        make_columns(None, **extras)


def test_routes_are_given_once():
    with pytest.raises(DataError, match="given twice") as caught:
        make_columns([ONE] * 3, expert_routes=[ONE] * 3)
    check_says_what_to_do(caught.value)


def test_no_column_takes_the_name_of_a_field_that_collators_make():
    for name in ("expert_routes", "router_padding_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"):
        with pytest.raises(DataError, match=f"cannot be called '{name}'"):
            SampleColumns.from_lists(input_ids=TOKENS, columns={name: [[0.0] * len(row) for row in TOKENS]})


@settings(deadline=None)
@given(sample_lists(carries=("router_replay", "vision")), st.data())
def test_choosing_samples_copies_no_extra_and_pickling_takes_theirs_alone(lists, data):
    columns = lists.to_columns()
    chosen = data.draw(st.lists(st.integers(0, len(columns) - 1)))
    taken = columns.take(chosen)
    again = data.draw(st.permutations(range(len(chosen))))
    sent = pickle.loads(pickle.dumps(taken.take(again)))
    for name, view in columns.extras.items():
        assert taken.extras[name].values is view.values
        arrived = sent.extras[name]
        assert arrived.values.dtype == view.values.dtype
        assert arrived.values.shape == (int(view.lengths[chosen].sum()), *view.values.shape[1:]), "nobody else's values travel"
        for place, source in enumerate(again):
            assert arrived[place].tobytes() == view[chosen[source]].tobytes()


def test_a_transport_that_takes_buffers_out_of_band_is_handed_the_values_themselves():
    """As Ray does with protocol 5: slices of the controller's own memory, one for samples that are neighbours."""
    values = np.arange(24, dtype=np.int32).reshape(6, 2, 2)
    view = RaggedView.of(Ragged(values, offsets_of([1, 2, 0, 2, 1]))).take([1, 2, 3, 0])
    buffers = []
    pickled = pickle.dumps(view, protocol=5, buffer_callback=buffers.append)
    raw = [np.frombuffer(buffer.raw(), dtype=np.int32) for buffer in buffers]
    assert [np.shares_memory(array, values) for array in raw if array.size in (4, 16)] == [True, True]
    restored = pickle.loads(pickled, buffers=buffers)
    assert [restored[sample].tolist() for sample in range(4)] == [view[sample].tolist() for sample in range(4)]


@pytest.mark.parametrize(
    ("starts", "lengths"), [([0, 3], [1, 2]), ([-1], [1]), ([0], [-1]), ([0, 1], [1]), ([[0]], [[1]])], ids=str
)
def test_views_reach_beyond_nothing(starts, lengths):
    with pytest.raises(AssertionError):
        RaggedView(np.zeros(4), np.array(starts), np.array(lengths))
