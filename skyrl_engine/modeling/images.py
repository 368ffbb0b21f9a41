"""Find the images of a micro-batch among its tokens, and check them against the model before features replace tokens."""

from typing import Any, NoReturn

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.extras import IMAGE_GRID, PIXEL_VALUES, TOKEN_TYPES
from skyrl_engine.contracts.values.ragged import IntArray, offsets_of
from skyrl_engine.errors import ContractError, DataError, SampleError, UnsupportedError

IMAGE = 1
"""The token type of images in transformers' processors; 0 is text, 2 is video."""

_REMEDY = "Prepare the samples with the processor that belongs to the model"


@frozen
class ImageTokens:
    """The form in which a model takes images: `merge` x `merge` patches of `patch` numbers become one token, with the id `token`."""

    token: int
    merge: int
    patch: int

    @classmethod
    def of(cls, config: Any) -> "ImageTokens":
        """Read a `transformers.Qwen3VLConfig`."""
        vision = config.vision_config
        return cls(
            token=int(config.image_token_id),
            merge=int(vision.spatial_merge_size),
            patch=int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2),
        )


@frozen(eq=False)
class PlacedImages:
    """Images among the real tokens of a micro-batch, those where the attention mask is 1, in row-major order.

    `lengths` int64[samples] are the samples' numbers of tokens. Image j belongs to sample `owners[j]`, has `sides[j]` tokens along time,
    height and width (int64[images, 3]), and its tokens are `places[bounds[j] : bounds[j + 1]]`, one after another.
    """

    lengths: IntArray
    owners: IntArray
    sides: IntArray
    places: IntArray
    bounds: IntArray


def place_images(micro_batch: MicroBatch, tokens: ImageTokens, *, pixels: bool = True) -> PlacedImages:
    """Find every image of `micro_batch`, whose images are numbered by `ragged_offsets` of `image_grid_thw` and `pixel_values`.

    Without `pixels` the pixel values are not checked, because only the first stage of a pipeline has them.

    Raises SampleError if token ids, token types, grids and pixels contradict each other or the model, because surplus
    features would be dropped silently. Raises UnsupportedError for tokens of videos, and ContractError for a collator that does not give the
    images' samples.
    """
    lengths = micro_batch.sequence_lengths.values
    mask = micro_batch.inputs["attention_mask"].flatten().bool()
    if int(mask.sum()) != int(lengths.sum()):
        raise ContractError(
            f"the collator's attention mask marks {int(mask.sum())} tokens, its sequence lengths add up to {int(lengths.sum())}",
            remedy="Correct the collator",
        )
    all_ids = micro_batch.inputs["input_ids"].flatten()
    if (all_ids[~mask] == tokens.token).any():
        raise DataError(
            f"rows are padded with {tokens.token}, the model's image token",
            remedy="Set another padding token in the tokenizer",
        )
    ids = all_ids[mask].numpy()
    types = micro_batch.inputs[TOKEN_TYPES].flatten()[mask].numpy() if TOKEN_TYPES in micro_batch.inputs else np.zeros_like(ids)
    sample_of = np.repeat(np.arange(len(lengths)), lengths)
    _check_types(micro_batch, ids, types, sample_of, tokens)

    owned = _count_owned(micro_batch, IMAGE_GRID, len(lengths))
    grids = micro_batch.inputs[IMAGE_GRID].numpy() if owned.any() else np.zeros((0, 3), dtype=np.int64)
    owners = np.repeat(np.arange(len(lengths)), owned)
    if (image := _first((grids < 1).any(axis=1) | (grids[:, 1:] % tokens.merge).any(axis=1))) is not None:
        cause = f"has an image of {grids[image].tolist()} patches, and the model merges {tokens.merge} x {tokens.merge} of them"
        _refuse(micro_batch, int(owners[image]), cause)
    if pixels:
        _check_patches(micro_batch, grids, owners, tokens)
    sides = grids // np.array([1, tokens.merge, tokens.merge])
    bounds = offsets_of(sides.prod(axis=1))
    places = np.flatnonzero(types == IMAGE)
    counted = np.bincount(sample_of[places], minlength=len(lengths))
    wanted = _sum_by_owner(owners, np.diff(bounds), len(lengths))
    if (sample := _first(counted != wanted)) is not None:
        _refuse(
            micro_batch,
            sample,
            f"has {counted[sample]} image tokens where its {owned[sample]} images make {wanted[sample]} features",
            "Prepare it with the processor that belongs to the model, and cut none of its tokens",
        )
    torn = places[bounds[1:] - 1] - places[bounds[:-1]] != np.diff(bounds) - 1
    if (image := _first(torn)) is not None:
        _refuse(micro_batch, int(owners[image]), "has other tokens among those of an image")
    return PlacedImages(lengths, owners, sides, places, bounds)


def choose_images(pixel_values: Tensor, grid: Tensor, sizes: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the images that some features belong to, and the numbers of these features among those of the images that are returned.

    `pixel_values` [patches, d] and `grid` int64[images, 3] are of images that make `sizes` int64[images] features each; `features` int64[m]
    are numbered over all of them.
    """
    image_of_feature = torch.arange(len(grid)).repeat_interleave(sizes)
    needed = torch.zeros(len(grid), dtype=torch.bool).index_fill(0, image_of_feature[features], True)
    number = needed.repeat_interleave(sizes).cumsum(0) - 1
    return pixel_values[needed.repeat_interleave(grid.prod(1))], grid[needed], number[features]


def _check_types(micro_batch: MicroBatch, ids: IntArray, types: IntArray, sample_of: IntArray, tokens: ImageTokens) -> None:
    """Check that token types and token ids mark the same places as images, and that there are only text and images."""
    if (place := _first(types > IMAGE)) is not None:
        raise UnsupportedError(
            f"{_name(micro_batch, int(sample_of[place]))} holds tokens of type {types[place]}",
            remedy="Train on text and images; videos are not supported",
        )
    if (place := _first((ids == tokens.token) != (types == IMAGE))) is not None:
        _refuse(
            micro_batch,
            int(sample_of[place]),
            f"has the token {ids[place]} of type {types[place]}, and the model's image token is {tokens.token}, of type {IMAGE}",
        )


def _check_patches(micro_batch: MicroBatch, grids: IntArray, owners: IntArray, tokens: ImageTokens) -> None:
    """Check that every sample has as many patches as its grids count, of the model's size."""
    patches = _count_owned(micro_batch, PIXEL_VALUES, len(micro_batch.sequence_lengths.values))
    pixels = micro_batch.inputs.get(PIXEL_VALUES)
    counted = _sum_by_owner(owners, grids.prod(axis=1), len(patches))
    if (sample := _first(counted != patches)) is not None:
        _refuse(micro_batch, sample, f"has {patches[sample]} patches where its images count {counted[sample]}")
    if pixels is not None and len(pixels) and pixels.shape[1] != tokens.patch:
        _refuse(
            micro_batch, int(owners[0]), f"has patches of {pixels.shape[1]} numbers, and the model takes patches of {tokens.patch}"
        )


def _count_owned(micro_batch: MicroBatch, name: str, samples: int) -> IntArray:
    """Return int64[samples], the number of entries of the ragged input `name` that each sample owns."""
    tensor, offsets = micro_batch.inputs.get(name), micro_batch.ragged_offsets.get(name)
    if tensor is None:
        return np.zeros(samples, dtype=np.int64)
    if offsets is None or len(offsets) != samples + 1 or offsets[-1] != len(tensor):
        raise ContractError(
            f"the collator does not say what of {name} each of {samples} samples owns",
            remedy="Correct the collator: ragged_offsets bound it",
        )
    return np.diff(offsets)


def _sum_by_owner(owners: IntArray, values: IntArray, samples: int) -> IntArray:
    return np.bincount(owners, weights=values, minlength=samples).astype(np.int64)


def _first(wrong: Any) -> int | None:
    return int(np.argmax(wrong)) if wrong.any() else None


def _name(micro_batch: MicroBatch, sample: int) -> str:
    of_what = " of a micro-batch" if micro_batch.sample_ids is None else ""
    return f"sample {_id_of(micro_batch, sample)}{of_what}"


def _id_of(micro_batch: MicroBatch, sample: int) -> int:
    """Return the sample's id; its index where the micro-batch has no ids."""
    return sample if micro_batch.sample_ids is None else int(micro_batch.sample_ids[sample])


def _refuse(micro_batch: MicroBatch, sample: int, cause: str, remedy: str = _REMEDY) -> NoReturn:
    raise SampleError(f"{_name(micro_batch, sample)} {cause}", sample=_id_of(micro_batch, sample), remedy=remedy)
