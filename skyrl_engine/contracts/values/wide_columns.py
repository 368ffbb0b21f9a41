"""Columns of k numbers per response token, [A, k]: read from lists of lists, arrays and tensors, and checked."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray
from skyrl_engine.errors import DataError


def is_wide(rows: Sequence[Any]) -> bool:
    """Return True for rows that hold a list or array per response token, judged by the first token there is."""
    for row in rows:
        if getattr(row, "ndim", None) is not None:
            return bool(row.ndim > 1)
        first = next(iter(row), None) if isinstance(row, Sequence) and not isinstance(row, str | bytes) else None
        if first is not None:
            return isinstance(first, list | tuple) or getattr(first, "ndim", 0) > 0
    return False


def wide_column(name: str, rows: Sequence[Any], actions: IntArray) -> AnyArray:
    """Return [A, k] of one nested list, array or tensor per sample: int64 where all numbers are integers of 0 or more, float32 otherwise.

    Raises DataError naming the first sample whose entries are no numbers, of another k, or not one per response token, int64[N] `actions`.
    """
    remedy = f"Give {name} the same number of numbers, one or more, for every response token"
    arrays: list[AnyArray] = []
    width: int | None = None
    for sample, (row, count) in enumerate(zip(rows, actions.tolist(), strict=True)):
        array = _array(row)
        if array is not None and array.size == 0:
            array = np.zeros((0, width or 1), dtype=np.int64)
        elif array is None or array.ndim != 2 or array.dtype.kind not in "iuf":
            raise DataError(
                f"sample {sample} has something in {name} that is no list of equally many numbers per token", remedy=remedy
            )
        elif width is not None and array.shape[1] != width:
            raise DataError(f"sample {sample} has {array.shape[1]} numbers per token in {name}, others {width}", remedy=remedy)
        else:
            width = array.shape[1]
        if len(array) != count:
            raise DataError(f"sample {sample} has {len(array)} entries in {name} for {count} response tokens", remedy=remedy)
        arrays.append(array)
    filled = [array for array in arrays if len(array)]
    whole = all(array.dtype.kind in "iu" and array.min() >= 0 for array in filled)
    dtype = np.int64 if whole else np.float32
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, as in other columns
        return np.concatenate([np.zeros((0, width or 1), dtype=dtype), *(array.astype(dtype) for array in filled)])


def _array(row: Any) -> AnyArray | None:
    if hasattr(row, "detach"):  # a torch tensor; torch is not imported for the others
        row = row.detach().cpu()
        row = (row.float() if row.is_floating_point() else row).numpy()
    try:
        return np.asarray(row)
    except ValueError:  # lists of different length inside
        return None


def check_wide_column(name: str, values: AnyArray, total: int) -> AnyArray:
    """Return float32 or int64 [A, k]. Raises DataError for other shapes and types, and for integers that are no token ids."""
    if len(values) != total or values.shape[1] < 1:
        raise DataError(
            f"column {name!r} has shape {list(values.shape)} where the samples have {total} response tokens",
            remedy="Give k numbers, one or more, per response token",
        )
    if values.dtype == np.float32:
        return np.ascontiguousarray(values)
    if values.dtype not in (np.int32, np.int64):
        raise DataError(
            f"column {name!r} must be float32, or int32 or int64 token ids, not {values.dtype}", remedy="Cast it before the call"
        )
    if values.min(initial=0) < 0:
        raise DataError(f"column {name!r} holds the negative token id {int(values.min())}", remedy="Use ids of the tokenizer")
    return np.ascontiguousarray(values, dtype=np.int64)
