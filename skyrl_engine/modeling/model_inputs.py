"""Turn a micro-batch's rows into the scorer's arguments: unchanged rows of one sequence each, or one row of documents."""

from collections.abc import Mapping

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine.contracts.kinds.backend import EmbeddingNoise, MicroBatch
from skyrl_engine.contracts.values.extras import IMAGE_GRID, OF_IMAGES, PIXEL_VALUES
from skyrl_engine.contracts.values.prefixes import PrefixTree
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.errors import ContractError, DataError, UnsupportedError
from skyrl_engine.modeling.images import ImageTokens
from skyrl_engine.modeling.rotary_positions import rotary_positions
from skyrl_engine.modeling.segments import Segments

_TEXT = frozenset({"input_ids", "attention_mask", "position_ids"})


@frozen(eq=False)
class ModelInputs:
    """The scorer's arguments on the CPU: model inputs [rows, width], flat positions in them int64[n], the segments of a packed row, and noise.

    For a model that takes images, `position_ids` are [3, rows, width], and `pixel_values` and `image_grid_thw` are present if any sample has
    an image.
    """

    inputs: Mapping[str, Tensor]
    positions: Tensor
    segments: Segments | None
    noise: EmbeddingNoise | None = None


def model_inputs(micro_batch: MicroBatch, *, one_row: bool = False, images: ImageTokens | None = None) -> ModelInputs:
    """Return the scorer's arguments: rows of one sequence each unchanged; other rows, or with `one_row` all, as one row of real tokens.

    The attention mask marks the real tokens, and `sequence_lengths` divides them into documents, or `tree` into segments. Alignment gaps,
    padding and empty rows are left out, so nothing attends to them and they cost nothing. `images` describes how the model takes images (None:
    it takes none).

    Raises ContractError if mask and lengths contradict each other, what `rotary_positions` raises for images, and UnsupportedError for further
    model inputs, because models accept and ignore unknown keywords.
    """
    tensors = _pass_rows_through(micro_batch, images)
    if not one_row and micro_batch.tree is None and not (micro_batch.sequence_lengths.lengths > 1).any():
        return ModelInputs(tensors, micro_batch.positions, None, micro_batch.noise)
    mask_F = micro_batch.inputs["attention_mask"].flatten().bool()
    ragged = micro_batch.sequence_lengths if micro_batch.tree is None else micro_batch.tree.lengths
    lengths = ragged.values
    lengths = lengths[lengths > 0]
    _check_layout(micro_batch, mask_F, lengths, ragged)
    # a micro-batch without documents must still pass through the model, because other ranks wait in its collectives
    if not len(lengths):
        mask_F, lengths = torch.arange(len(mask_F)) == 0, np.ones(1, dtype=np.int64)
    real = mask_F.nonzero()[:, 0]
    inputs = {name: tensor for name, tensor in tensors.items() if name in OF_IMAGES}
    for name in ("input_ids", "position_ids"):
        if name in tensors:
            inputs[name] = tensors[name].flatten(-2)[..., real].unsqueeze(-2)
    if "position_ids" not in inputs and micro_batch.tree is not None:
        raise ContractError(
            "the collator left out position_ids", remedy="Correct the collator: build every field that is asked for"
        )
    if "position_ids" not in inputs:
        inputs["position_ids"] = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    places = mask_F.cumsum(0) - 1
    parents = None if micro_batch.tree is None else _parents_of(micro_batch.tree)
    noise = micro_batch.noise
    if noise is not None:
        noise = EmbeddingNoise(noise.alpha, noise.keys.flatten()[real], noise.lengths.flatten()[real])
    return ModelInputs(inputs, places[micro_batch.positions], Segments(tuple(int(length) for length in lengths), parents), noise)


def _parents_of(tree: PrefixTree) -> tuple[int, ...] | None:
    """Return the parents of all rows' segments, numbered over all rows; None where no segment has one: they are documents."""
    parents = tree.parents
    if (parents.values < 0).all():
        return None
    firsts = np.repeat(parents.offsets[:-1], parents.lengths)
    return tuple(np.where(parents.values < 0, -1, parents.values + firsts).tolist())


def _pass_rows_through(micro_batch: MicroBatch, images: ImageTokens | None) -> Mapping[str, Tensor]:
    """Return the model's inputs for unchanged rows."""
    unknown = sorted(set(micro_batch.inputs) - _TEXT - set(OF_IMAGES if images is not None else ()))
    if unknown:
        raise UnsupportedError(
            f"rows carry {unknown[0]}, which the backend does not give to its model",
            remedy="Leave the images out, or train a vision-language model on a backend that declares 'vision'"
            if unknown[0] in OF_IMAGES
            else "Leave it out of the samples, or choose another backend",
        )
    if images is None:
        return micro_batch.inputs
    names = ("input_ids", "attention_mask", *((PIXEL_VALUES, IMAGE_GRID) if len(micro_batch.inputs.get(IMAGE_GRID, ())) else ()))
    if missing := [name for name in names if name not in micro_batch.inputs]:
        raise ContractError(
            f"the collator left out {missing[0]}", remedy="Correct the collator: build every field that is asked for"
        )
    return {**{name: micro_batch.inputs[name] for name in names}, "position_ids": rotary_positions(micro_batch, images)}


def check_tokens(micro_batch: MicroBatch, vocabulary: int) -> None:
    """Raises DataError for a token outside of the vocabulary, which would read foreign memory or end a CUDA context."""
    for column, ids in micro_batch.candidates.items():
        wrong = ids[(ids < 0) | (ids >= vocabulary)]
        if wrong.numel():
            raise DataError(
                f"the column {column!r} holds the token id {int(wrong[0])}, the model's vocabulary has {vocabulary}",
                remedy="Use ids of the tokenizer that belongs to the model; where a token has fewer candidates, repeat one with no weight",
            )
    for tokens in (micro_batch.inputs["input_ids"], micro_batch.labels):
        largest = int(tokens.max()) if tokens.numel() else 0
        if largest >= vocabulary:
            raise DataError(
                f"a micro-batch holds token id {largest}, the model's vocabulary has {vocabulary}",
                remedy="Use the tokenizer that belongs to the model",
            )


def _check_layout(micro_batch: MicroBatch, mask_F: Tensor, lengths: np.ndarray, of_rows: Ragged) -> None:
    """Check that each row's mask fits its sequences' lengths `of_rows`, that no sequence has a gap, and that only real tokens are scored."""
    rows = micro_batch.inputs["attention_mask"].shape[0]
    counted = mask_F.reshape(rows, -1).sum(1).numpy()
    stated = np.diff(offsets_of(of_rows.values)[of_rows.offsets])
    if len(stated) != rows or (counted != stated).any():
        raise ContractError(
            f"the collator's attention mask marks {counted.tolist()} tokens per row, its sequence lengths add up to {stated.tolist()}",
            remedy="Correct the collator",
        )
    columns = mask_F.nonzero()[:, 0].numpy()
    last = np.cumsum(lengths) - 1
    torn = columns[last] - columns[last - lengths + 1] != lengths - 1
    if torn.any():
        raise ContractError(
            f"the collator's attention mask has a gap inside sequence {int(torn.argmax())} of a packed micro-batch",
            remedy="Correct the collator: gaps lie between sequences",
        )
    if not mask_F[micro_batch.positions].all():
        raise ContractError("the collator scores a position without a token", remedy="Correct the collator")
