"""Rotary positions made without a model are those that transformers makes with one; images are checked before they are placed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.kinds.collator import collate
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.errors import ContractError, DataError, UnsupportedError
from skyrl_engine.modeling.images import ImageTokens, place_images
from skyrl_engine.modeling.rotary_positions import real_positions, rotary_positions

TOKEN, START, TEXT = 3, 5, 9
TOKENS = ImageTokens(token=TOKEN, merge=2, patch=6)

Grid = tuple[int, int, int]
Sample = list[int | Grid]
"""So many text tokens, or an image of so many patches."""

grids = st.tuples(st.just(1), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 8]))
samples = st.lists(st.tuples(st.lists(st.tuples(st.integers(1, 4), grids), max_size=3), st.integers(0, 3)), min_size=1, max_size=5)


def lay_out(sample: Sample) -> tuple[list[int], list[int], list[Grid]]:
    """Token ids, token types and grids."""
    ids, types, images = [START], [0], []
    for part in sample:
        if isinstance(part, int):
            ids, types = ids + [TEXT] * part, types + [0] * part
        else:
            count = part[0] * part[1] * part[2] // 4
            ids, types = ids + [TOKEN] * count, types + [1] * count
            images.append(part)
    return ids, types, images


def make_micro_batch(rows: list[list[Sample]], *, before: int = 0, align: int = 1, after: int = 0) -> MicroBatch:
    """Rows of samples, each rounded up to `align` tokens, after `before` and before `after` columns of padding."""
    read = [[lay_out(sample) for sample in row] for row in rows]
    width = before + after + max(sum(-(-len(ids) // align) * align for ids, *_ in row) for row in read)
    fields = {
        name: torch.zeros(len(rows), width, dtype=torch.int64) for name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    for number, row in enumerate(read):
        column = before
        for ids, types, _images in row:
            here = slice(column, column + len(ids))
            fields["input_ids"][number, here] = torch.tensor(ids)
            fields["attention_mask"][number, here] = 1
            fields["mm_token_type_ids"][number, here] = torch.tensor(types)
            column += -(-len(ids) // align) * align
    images = [images for row in read for _ids, _types, images in row]
    flat = np.array([grid for grids_of_sample in images for grid in grids_of_sample], dtype=np.int64).reshape(-1, 3)
    patches = offsets_of([sum(int(np.prod(grid)) for grid in grids_of_sample) for grids_of_sample in images])
    fields["image_grid_thw"] = torch.from_numpy(flat)
    fields["pixel_values"] = torch.zeros(int(patches[-1]), TOKENS.patch)
    nothing = torch.zeros(0, dtype=torch.int64)
    lengths = Ragged.from_list([[len(ids) for ids, *_ in row] for row in read], np.int64)
    offsets = {"image_grid_thw": offsets_of([len(grids_of_sample) for grids_of_sample in images]), "pixel_values": patches}
    return MicroBatch(fields, nothing, nothing, lengths, None, ragged_offsets=offsets)


def transformers_positions(sample: Sample) -> torch.Tensor:
    """`get_rope_index` of one sample, int64[3, tokens]; a namespace stands for the model, of which it reads the configuration alone."""
    from transformers import Qwen3VLModel

    ids, types, images = lay_out(sample)
    owner: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    owner.get_vision_position_ids = Qwen3VLModel.get_vision_position_ids.__get__(owner)
    grid = torch.tensor(images) if images else None
    positions: torch.Tensor = Qwen3VLModel.get_rope_index(owner, torch.tensor([ids]), torch.tensor([types]), image_grid_thw=grid)[0]
    return positions[:, 0]


@settings(max_examples=60)
@given(
    given_samples=samples, cut=st.integers(1, 3), before=st.integers(0, 2), align=st.sampled_from([1, 4]), after=st.integers(0, 3)
)
def test_they_are_those_of_transformers_for_every_sample_by_itself(
    given_samples: list[Any], cut: int, before: int, align: int, after: int
) -> None:
    """Text precedes every image here: transformers cannot tell images apart that follow each other."""
    chosen: list[Sample] = [[part for pair in pairs for part in pair] + [last] for pairs, last in given_samples]
    rows = [chosen[start : start + cut] for start in range(0, len(chosen), cut)]
    batch = make_micro_batch(rows, before=before, align=align, after=after)
    positions = rotary_positions(batch, TOKENS)
    assert positions.dtype == torch.int64
    assert positions.shape == (3, *batch.inputs["input_ids"].shape)
    real = batch.inputs["attention_mask"].bool()
    assert torch.equal(positions[:, real], torch.cat([transformers_positions(sample) for sample in chosen], 1))
    assert not positions[:, ~real].any()


def test_the_text_goes_on_behind_the_longer_side_of_an_image() -> None:
    positions = rotary_positions(make_micro_batch([[[1, (1, 2, 6), 1]]]), TOKENS)
    assert positions[:, 0].tolist() == [[0, 1, 2, 2, 2, 5], [0, 1, 2, 2, 2, 5], [0, 1, 2, 3, 4, 5]]


def test_images_may_follow_each_other_and_start_a_row() -> None:
    batch = make_micro_batch([[[(1, 2, 4), (1, 4, 2), 1], [(1, 2, 2)]]])
    expected = [[0, 1, 1, 3, 3, 5, 0, 1], [0, 1, 1, 3, 4, 5, 0, 1], [0, 1, 2, 3, 3, 5, 0, 1]]
    assert rotary_positions(batch, TOKENS)[:, 0].tolist() == expected


def test_empty_samples_rows_and_batches_have_no_positions() -> None:
    batch = make_micro_batch([[[2]], []])
    assert rotary_positions(batch, TOKENS)[:, 1].tolist() == [[0] * 3] * 3
    empty = {name: tensor[:, :0] for name, tensor in batch.inputs.items() if name not in batch.ragged_offsets}
    lengths = Ragged.from_list([[0], []], np.int64)
    assert rotary_positions(evolve(batch, inputs=empty, sequence_lengths=lengths), TOKENS).shape == (3, 2, 0)


def test_text_alone_needs_nothing_of_images() -> None:
    batch = make_micro_batch([[[2], [3]]])
    plain = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
    expected = [[0, 1, 2, 0, 1, 2, 3]]
    for inputs in (plain, batch.inputs):
        positions = rotary_positions(evolve(batch, inputs=inputs, ragged_offsets={}) if inputs is plain else batch, TOKENS)
        assert positions.tolist() == [expected] * 3


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_what_collators_build_is_understood(name: str) -> None:
    import skyrl_engine_collators.plugin as collators

    chosen: list[Sample] = [[1, (1, 2, 4), 2], [3], [2, (1, 2, 2), 1, (1, 4, 2), 1]]
    read = [lay_out(sample) for sample in chosen]
    columns = SampleColumns.from_lists(
        input_ids=[ids for ids, *_ in read],
        extras={
            "pixel_values": [np.zeros((sum(int(np.prod(grid)) for grid in grids), TOKENS.patch), np.float32) for *_, grids in read],
            "image_grid_thw": [grids or None for *_, grids in read],
            "mm_token_type_ids": [types for _, types, _ in read],
        },
    )
    collator = getattr(collators, name).skyrl_engine_make_collator(config=None, context=FactoryContext(pad_token_id=0))
    dense = collate(collator, columns)
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = MicroBatch(dense.fields, nothing, nothing, dense.sequence_lengths, None, ragged_offsets=dense.ragged_offsets)
    positions, real = rotary_positions(batch, TOKENS), dense["attention_mask"].bool()
    pieces = {len(ids): transformers_positions(sample) for (ids, *_), sample in zip(read, chosen, strict=True)}
    assert len(pieces) == len(chosen), "samples are told apart by their lengths"
    expected = torch.cat([pieces[int(length)] for length in dense.sequence_lengths.values], 1)
    assert torch.equal(positions[:, real], expected)


def change_input(batch: MicroBatch, name: str, place: Any, value: Any) -> MicroBatch:
    tensor = batch.inputs[name].clone()
    tensor[place] = value
    return evolve(batch, inputs={**batch.inputs, name: tensor})


IMAGES: list[list[Sample]] = [[[2], [1, (1, 2, 4), 2]]]
"""Sample 0 is text, sample 1 has an image: its tokens are in columns 5 and 6."""


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (change_input(make_micro_batch(IMAGES), "input_ids", (0, 6), TEXT), "sample 1 of a micro-batch has the token 9 of type 1"),
        (
            change_input(make_micro_batch(IMAGES), "mm_token_type_ids", (0, 5), 0),
            "sample 1 of a micro-batch has the token 3 of type 0",
        ),
        (change_input(make_micro_batch(IMAGES), "input_ids", (0, 0), TOKEN), "sample 0 of a micro-batch has the token 3 of type 0"),
        (
            change_input(make_micro_batch(IMAGES), "image_grid_thw", (0, 2), 2),
            "sample 1 of a micro-batch has 8 patches where its images count 4",
        ),
        (
            change_input(make_micro_batch(IMAGES), "image_grid_thw", 0, torch.tensor([1, 1, 8])),
            r"image of \[1, 1, 8\] patches, and the model merges 2 x 2",
        ),
        (
            change_input(
                change_input(make_micro_batch([[[(1, 2, 4), 1]]]), "mm_token_type_ids", (0, slice(2, 4)), torch.tensor([0, 1])),
                "input_ids",
                (0, slice(2, 4)),
                torch.tensor([TEXT, TOKEN]),
            ),
            "sample 0 of a micro-batch has other tokens among those of an image",
        ),
        (
            change_input(change_input(make_micro_batch(IMAGES), "input_ids", (0, 6), TEXT), "mm_token_type_ids", (0, 6), 0),
            "sample 1 of a micro-batch has 1 image tokens where its 1 images make 2 features",
        ),
    ],
)
def test_what_contradicts_itself_is_an_error_that_names_the_sample(batch: MicroBatch, message: str) -> None:
    with pytest.raises(DataError, match=message):
        place_images(batch, TOKENS)


def test_patches_of_another_model_are_refused() -> None:
    with pytest.raises(DataError, match="sample 1 of a micro-batch has patches of 6 numbers, and the model takes patches of 12"):
        place_images(make_micro_batch(IMAGES), ImageTokens(token=TOKEN, merge=2, patch=12))


def test_the_id_of_a_sample_is_said_where_it_is_known() -> None:
    batch = evolve(change_input(make_micro_batch(IMAGES), "input_ids", (0, 6), TEXT), sample_ids=np.array([70, 71]))
    with pytest.raises(DataError, match="sample 71 has the token 9"):
        place_images(batch, TOKENS)


def test_an_image_of_the_neighbour_is_no_image_of_ones_own() -> None:
    """Counts of the whole row agree here: each sample must have its own."""
    batch = make_micro_batch([[[(1, 2, 4)], [(1, 2, 2)]]])
    swapped = {name: offsets_of(np.diff(offsets)[::-1]) for name, offsets in batch.ragged_offsets.items()}
    swapped["image_grid_thw"] = batch.ragged_offsets["image_grid_thw"]
    grids = batch.inputs["image_grid_thw"].flip(0)
    with pytest.raises(DataError, match="sample 0 of a micro-batch has 2 image tokens where its 1 images make 1 features"):
        place_images(evolve(batch, inputs={**batch.inputs, "image_grid_thw": grids}, ragged_offsets=swapped), TOKENS)


def test_videos_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="sample 1 of a micro-batch holds tokens of type 2"):
        place_images(change_input(make_micro_batch(IMAGES), "mm_token_type_ids", (0, 5), 2), TOKENS)


def test_pixels_may_be_with_another_rank() -> None:
    batch = make_micro_batch(IMAGES)
    inputs = {name: tensor for name, tensor in batch.inputs.items() if name != "pixel_values"}
    grids = {"image_grid_thw": batch.ragged_offsets["image_grid_thw"]}
    elsewhere = evolve(batch, inputs=inputs, ragged_offsets=grids)
    expected = rotary_positions(batch, TOKENS)[:, batch.inputs["attention_mask"].bool()]
    assert torch.equal(real_positions(place_images(elsewhere, TOKENS, pixels=False)), expected)
    with pytest.raises(DataError, match="sample 1 of a micro-batch has 0 patches where its images count 8"):
        place_images(elsewhere, TOKENS)


def test_a_collator_that_does_not_say_whose_images_there_are_is_found_out() -> None:
    batch = make_micro_batch(IMAGES)
    with pytest.raises(ContractError, match="does not say what of image_grid_thw each of 2 samples owns"):
        place_images(evolve(batch, ragged_offsets={}), TOKENS)
    with pytest.raises(ContractError, match="mask marks 8 tokens, its sequence lengths add up to 9"):
        place_images(change_input(batch, "attention_mask", (0, 0), 0), TOKENS)
