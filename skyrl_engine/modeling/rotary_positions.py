"""Three-dimensional rotary positions of text and images, computed without the model."""

import numpy as np
import torch
from torch import Tensor

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.modeling.images import ImageTokens, PlacedImages, place_images


def rotary_positions(micro_batch: MicroBatch, tokens: ImageTokens) -> Tensor:
    """Return time, height and width of every token, int64[3, rows, width], on the CPU; 0 on padding and in gaps.

    They equal those of `transformers.Qwen3VLModel.get_rope_index` for each sample by itself (arXiv 2409.12191, section 2.1): text counts up on
    all axes alike; an image's tokens begin where the text before it ended, plus their own frame, row and column; text continues after the
    longer of the image's height and width. Rows may hold several samples, each of which begins at 0. Unlike there, an image may follow another
    without text in between.

    Raises what `place_images` raises.
    """
    mask = micro_batch.inputs["attention_mask"].bool()
    laid = torch.zeros(3, *mask.shape, dtype=torch.int64)
    laid[:, mask] = real_positions(place_images(micro_batch, tokens))
    return laid


def real_positions(images: PlacedImages) -> Tensor:
    """Return the positions of the real tokens alone, int64[3, tokens], in row-major order."""
    starts, ends = images.bounds[:-1], images.bounds[1:]
    # the number by which each token advances the positions after it
    steps = np.ones(int(images.lengths.sum()), dtype=np.int64)
    steps[images.places] = 0
    steps[images.places[ends - 1]] = images.sides[:, 1:].max(axis=1, initial=0)
    begins = np.cumsum(steps) - steps
    filled = images.lengths > 0
    first = offsets_of(images.lengths)[:-1][filled]
    begins -= np.repeat(begins[first], images.lengths[filled])

    positions = np.tile(begins, (3, 1))
    for start, end, side in zip(starts.tolist(), ends.tolist(), images.sides.tolist(), strict=True):
        positions[:, images.places[start:end]] += np.indices(side).reshape(3, -1)
    return torch.from_numpy(positions)
