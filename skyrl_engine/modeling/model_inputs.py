"""From a micro-batch's rows to what the scorer takes: rows as they are, or, where rows hold several sequences, one row of documents."""

from collections.abc import Mapping

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine.contracts.backend import MicroBatch
from skyrl_engine.errors import ContractError, UnsupportedError
from skyrl_engine.modeling.segments import Segments

_KNOWN = frozenset({"input_ids", "attention_mask", "position_ids"})


@frozen(eq=False)
class ModelInputs:
    """Arguments of the scorer, still on CPU: model inputs [rows, width], flat positions in them int64[n], and the segments of a packed row."""

    inputs: Mapping[str, Tensor]
    positions: Tensor
    segments: Segments | None


def model_inputs(micro_batch: MicroBatch) -> ModelInputs:
    """Rows of one sequence each stay as they are. Rows of several become one row [1, tokens] of real tokens alone.

    Where the documents lie is said by the attention mask, whose ones are cut by `sequence_lengths`: alignment gaps, padding and empty rows
    are left out, so nothing can attend to them and they cost nothing. Raises ContractError where mask and lengths contradict each other,
    UnsupportedError for model inputs that it does not know how to cut.
    """
    if not any(len(lengths) > 1 for lengths in micro_batch.sequence_lengths):
        return ModelInputs(micro_batch.inputs, micro_batch.positions, None)
    unknown = sorted(set(micro_batch.inputs) - _KNOWN)
    if unknown:
        raise UnsupportedError(
            f"packed rows carry {unknown[0]}, which the backend cannot cut into documents",
            remedy="Use a collator with one sample per row, such as padded",
        )
    mask_F = micro_batch.inputs["attention_mask"].flatten().bool()
    lengths = np.concatenate(micro_batch.sequence_lengths)
    lengths = lengths[lengths > 0]
    _check_layout(micro_batch, mask_F, lengths)
    if not len(lengths):  # a row of no document must pass through the model all the same: other ranks wait in its collectives
        mask_F, lengths = torch.arange(len(mask_F)) == 0, np.ones(1, dtype=np.int64)
    kept = mask_F.nonzero()[:, 0]
    inputs = {
        name: micro_batch.inputs[name].flatten()[kept][None] for name in ("input_ids", "position_ids") if name in micro_batch.inputs
    }
    if "position_ids" not in inputs:
        inputs["position_ids"] = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    places = mask_F.cumsum(0) - 1
    return ModelInputs(inputs, places[micro_batch.positions], Segments(tuple(int(length) for length in lengths)))


def _check_layout(micro_batch: MicroBatch, mask_F: Tensor, lengths: np.ndarray) -> None:
    """Every row's mask holds as many tokens as its sequences, no gap lies inside a sequence, and only real tokens are scored."""
    rows = micro_batch.inputs["attention_mask"].shape[0]
    counted = mask_F.reshape(rows, -1).sum(1).numpy()
    stated = np.array([int(row.sum()) for row in micro_batch.sequence_lengths])
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
