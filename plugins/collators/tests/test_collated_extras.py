"""Expert routes and images in dense rows: what is made, and what is not; both engines share this code."""

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine import DataError
from skyrl_engine.contracts import MODEL_INPUTS, Layout, RaggedView, SampleColumns, collate
from skyrl_engine.testing.error_checks import check_says_what_to_do
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator

COLLATORS = pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()], ids=["padded", "packed"])


def make_samples(**changes):
    """Three samples of 3, 1 and 4 tokens; the first has two images, the last has one."""
    arguments = {
        "prompts": [[1, 2], [3], [4, 5]],
        "responses": [[6], [], [7, 8]],
        "routes": [[[[2, 1]], [[3, 4]]], [[[5, 6]]], [[[7, 8]]]],
        "extras": {
            "pixel_values": [np.full((3, 2), 0.5), None, np.full((4, 2), -1.0)],
            "image_grid_thw": [[[1, 1, 2], [1, 1, 1]], None, [[1, 2, 2]]],
            "mm_token_type_ids": [[0, 1, 0], None, [1, 0, 0, 0]],
        },
        **changes,
    }
    return SampleColumns.from_rollouts(**arguments)


def test_padded_rows_by_hand():
    batch = collate(PaddedCollator(pad_token_id=9), make_samples())
    assert batch["expert_routes"][:, :, 0].tolist() == [
        [[0, 1], [2, 1], [3, 4], [0, 1]],
        [[0, 1], [0, 1], [0, 1], [5, 6]],
        [[7, 8], [0, 1], [0, 1], [0, 1]],
    ]
    true, false = True, False
    mask = [[true, false, false, true], [true, true, true, false], [false, true, true, true]]
    assert batch["router_padding_mask"].tolist() == mask
    assert batch["mm_token_type_ids"].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert batch["pixel_values"].tolist() == [[0.5, 0.5]] * 3 + [[-1.0, -1.0]] * 4
    assert batch["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 1], [1, 2, 2]]
    assert {name: offsets.tolist() for name, offsets in batch.ragged_offsets.items()} == {
        "pixel_values": [0, 3, 3, 7],
        "image_grid_thw": [0, 2, 2, 3],
    }


def test_packed_rows_by_hand():
    """Each sample on four columns, since tp is 4, and so of one length, the last first; gaps hold experts 0 and 1."""
    batch = collate(PackedCollator(pad_token_id=9), make_samples(), Layout(tp=4))
    assert batch["input_ids"].tolist() == [[4, 5, 7, 8, 3, 9, 9, 9, 1, 2, 6, 9]]
    routes = [[7, 8], [0, 1], [0, 1], [0, 1], [5, 6], [0, 1], [0, 1], [0, 1], [2, 1], [3, 4], [0, 1], [0, 1]]
    assert batch["expert_routes"][0, :, 0].tolist() == routes
    assert np.flatnonzero(~batch["router_padding_mask"][0].numpy()).tolist() == [0, 4, 8, 9]
    assert batch["mm_token_type_ids"].tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]]
    assert batch["pixel_values"][:, 0].tolist() == [-1.0] * 4 + [0.5] * 3
    assert batch.ragged_offsets["pixel_values"].tolist() == [0, 4, 4, 7]
    assert batch.ragged_offsets["image_grid_thw"].tolist() == [0, 1, 1, 3]


@COLLATORS
@pytest.mark.parametrize(
    ("largest", "dtype"), [(1, "uint8"), (255, "uint8"), (256, "int16"), (32767, "int16"), (32768, "int32"), (2**31 - 1, "int32")]
)
def test_routes_are_as_wide_as_the_widest_sample_needs(collator, largest, dtype):
    columns = make_samples(routes=[[[[0, 1]]], [[[largest, 0]]], [[[0, 1]]]])
    assert str(collate(collator, columns)["expert_routes"].numpy().dtype) == dtype
    part = columns.take([0])
    assert str(collate(collator, part)["expert_routes"].numpy().dtype) == dtype, "all micro-batches of a batch are alike"


@COLLATORS
def test_padding_that_needs_more_than_the_routes_is_held_too(collator):
    """With 300 choices the padding counts to 299, whatever the captured experts are."""
    batch = collate(collator, make_samples(routes=[np.zeros((1, 1, 300), dtype=np.uint8)] * 3))
    assert batch["expert_routes"].numpy().dtype == np.int16
    assert int(batch["expert_routes"].max()) == 299


@COLLATORS
def test_a_rank_without_samples_has_the_same_fields_as_the_others(collator):
    """The collectives of a mixture of experts run on every rank, also on one whose rows hold nothing."""
    columns = make_samples()
    plan = collator.plan(columns.lengths, Layout(dp=4))
    empty = next(rank[0] for rank in plan.mini_batches[0].ranks if not len(rank[0].samples))
    batch = collator.build(columns.take([]), empty.renumber(np.zeros(0, dtype=np.int64)), fields=MODEL_INPUTS)
    assert batch["expert_routes"].shape == (1, empty.width, 1, 2)
    assert batch["router_padding_mask"].all()
    assert batch["pixel_values"].shape == (0, 2)
    assert batch["image_grid_thw"].shape == (0, 3)
    assert batch["mm_token_type_ids"].tolist() == [[0] * empty.width]
    assert batch.ragged_offsets["pixel_values"].tolist() == [0]


@COLLATORS
def test_a_batch_without_images_or_routes_has_no_such_field(collator):
    batch = collate(collator, SampleColumns.from_lists(input_ids=[[1, 2], [3]]))
    assert not batch.fields.keys() & set(MODEL_INPUTS[3:])
    assert batch.ragged_offsets == {}


@COLLATORS
@pytest.mark.parametrize("name", ["expert_routes", "mm_token_type_ids"])
def test_an_extra_longer_than_its_sample_is_never_written_into_a_neighbour(collator, name):
    """Only who bypasses `create` can have such columns."""
    columns = make_samples()
    view = columns.extras[name]
    longer = RaggedView(view.values, np.zeros_like(view.starts), np.array([3, 3, 0], dtype=np.int64))
    with pytest.raises(DataError, match=f"sample 1 has 3 rows of {name} for 1 tokens") as caught:
        collate(collator, evolve(columns, extras={name: longer}))
    check_says_what_to_do(caught.value)
