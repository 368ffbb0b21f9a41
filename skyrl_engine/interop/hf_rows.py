"""Rows of a tokenized dataset, as transformers and TRL have them, read as documents: tokens and the label of each. No torch is imported."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, offsets_of, segment_indices
from skyrl_engine.errors import DataError

if TYPE_CHECKING:
    import torch

    from skyrl_engine.contracts.kinds.collator import GatherIndex

IGNORED = -100
"""The label of a position that carries no loss, as in transformers."""

MASKS = ("completion_mask", "assistant_masks")
"""Keys of a row that say, with 1, which tokens are trained."""

KEYS = ("input_ids", "labels", *MASKS, "attention_mask", "seq_lengths")
"""All keys that a row may have."""

Row = Mapping[str, Any]


@frozen(eq=False)
class LabelledDocuments:
    """D documents end to end: `input_ids` and `labels` int64[total], unshifted, with `offsets` int64[D+1]."""

    input_ids: IntArray
    labels: IntArray
    offsets: IntArray

    def take(self, chosen: IntArray) -> "LabelledDocuments":
        """Return these documents, int64[n] numbers, in this order."""
        places = segment_indices(self.offsets, chosen)
        return LabelledDocuments(self.input_ids[places], self.labels[places], offsets_of(np.diff(self.offsets)[chosen]))


@frozen(eq=False)
class LaidOut:
    """A batch, its documents in the order of its rows, and the place at which each token but a document's first is predicted."""

    batch: "dict[str, torch.Tensor | int | bool]"
    documents: LabelledDocuments
    gather: "GatherIndex"


def read_documents(rows: Sequence[Row], *, every_token: bool, ignore: Collection[str]) -> LabelledDocuments:
    """Read rows of `input_ids` [T], and what else `KEYS` name, each [T].

    `labels` are -100 where nothing is learned, and so they become where a mask is 0. Tokens whose `attention_mask` is 0 are padding and are
    left out. `seq_lengths` cut a row that holds several documents. Rows of `input_ids` alone are trained on every token, if `every_token` says
    so. Keys that `ignore` names are not read.

    Raises DataError, with the row and the key, for any other key, for values that do not fit, and for rows of different keys.
    """
    if not len(rows):
        raise DataError("the collator was given no row", remedy="Give it at least one")
    read = [_read_row(place, row, every_token, ignore) for place, row in enumerate(rows)]
    kinds = [frozenset(row) - frozenset(ignore) for row in rows]
    for place, keys in enumerate(kinds):
        if keys != kinds[0]:
            raise DataError(
                f"row {place} has the keys {', '.join(sorted(keys))}, and row 0 has {', '.join(sorted(kinds[0]))}",
                remedy="Give all rows of a dataset the same keys",
            )
    return LabelledDocuments(
        np.concatenate([ids for ids, _, _ in read]),
        np.concatenate([labels for _, labels, _ in read]),
        offsets_of(np.concatenate([lengths for _, _, lengths in read])),
    )


def _read_row(place: int, row: Row, every_token: bool, ignore: Collection[str]) -> tuple[IntArray, IntArray, IntArray]:
    """Return int64[T] ids and labels, and the lengths of the row's documents."""
    if not isinstance(row, Mapping):
        raise DataError(f"row {place} is of type {type(row).__name__}", remedy="Give mappings with input_ids, one per row")
    values = {name: _read_values(place, name, row[name]) for name in row if name not in ignore}
    if "input_ids" not in values or not len(values["input_ids"]):
        raise DataError(f"row {place} has no input_ids", remedy="Tokenize the dataset first, and leave out rows without a token")
    ids = values["input_ids"]
    for name, own in values.items():
        if name != "seq_lengths" and len(own) != len(ids):
            raise DataError(f"row {place}: {len(own)} {name} for {len(ids)} tokens", remedy="Give one number per token")
    if not every_token and not {"labels", *MASKS} & values.keys():
        raise DataError(
            f"row {place} has neither labels nor one of {', '.join(MASKS)}",
            remedy="Set remove_unused_columns = False if the dataset has one, or say hf_collator(..., every_token=True)",
        )
    labels = values.get("labels", ids)
    for name in MASKS:
        if name in values:
            labels = np.where(_read_mask(place, name, values[name]), labels, IGNORED)
    if ((labels < 0) & (labels != IGNORED)).any():
        raise DataError(
            f"row {place} has the label {labels[(labels < 0) & (labels != IGNORED)][0]}",
            remedy=f"Use {IGNORED} for tokens that are not trained",
        )
    ids, labels = (_leave_out_padding(place, values.get("attention_mask"), own) for own in (ids, labels))
    lengths = values.get("seq_lengths", np.asarray([len(ids)]))
    if lengths.sum() != len(ids) or (lengths < 1).any():
        raise DataError(
            f"row {place}: seq_lengths {lengths.tolist()!s:.80} for {len(ids)} tokens",
            remedy="Give the length of every document of the row, 1 or more",
        )
    return ids, labels, lengths


def _read_values(place: int, name: str, values: Any) -> IntArray:
    if name not in KEYS:
        raise DataError(
            f"row {place} has the key {name!r}, of which hf_collator makes nothing",
            remedy=f"Remove the column, or say hf_collator(..., ignore=({name!r},)); what it reads are {', '.join(KEYS)}",
        )
    try:
        array: AnyArray = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    except (TypeError, ValueError):  # lists of several lengths
        array = np.asarray(None)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iub"):
        raise DataError(f"row {place}: {name} are no list of integers: {values!r:.80}", remedy="Give one integer per token")
    return array.astype(np.int64, copy=False)


def _read_mask(place: int, name: str, mask: IntArray) -> AnyArray:
    if ((mask != 0) & (mask != 1)).any():
        raise DataError(
            f"row {place}: {name} has the number {mask[(mask != 0) & (mask != 1)][0]}", remedy="Give 1 for yes and 0 for no"
        )
    return np.equal(mask, 1)


def _leave_out_padding(place: int, mask: IntArray | None, values: IntArray) -> IntArray:
    if mask is None:
        return values
    kept = np.flatnonzero(_read_mask(place, "attention_mask", mask))
    if not len(kept) or kept[-1] - kept[0] + 1 != len(kept):
        raise DataError(
            f"row {place}: attention_mask leaves {'nothing' if not len(kept) else 'a gap between tokens'}",
            remedy="Let zeros stand before and behind the tokens of a row alone",
        )
    return values[kept]
