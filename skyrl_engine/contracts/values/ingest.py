"""Python lists, NumPy arrays and torch tensors, one per sample, as flat columns: read once, checked once, each error naming its sample."""

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, cast

import numpy as np

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, offsets_of
from skyrl_engine.contracts.values.wide_columns import is_wide, wide_column
from skyrl_engine.errors import DataError

READERS = "skyrl_engine.list_reader"
"""Entry points of this group name functions that are a `ListReader`."""

logger = logging.getLogger(__name__)

Rows = Sequence[Any]
"""One list, NumPy array or torch tensor of numbers per sample."""


class ListReader(Protocol):
    """Reads lists of Python numbers faster than Python does, into the same values."""

    def __call__(self, rows: list[Any], dtype: type[np.generic]) -> tuple[AnyArray, IntArray] | None:
        """The numbers of n lists, one after the other, and how many each has, int64[n].

        `dtype` is int32 or int64 for whole numbers, float32 for any, uint8 for 0 and 1. None where a row is no list, or something in one is no
        int, bool or float itself or does not fit; then Python reads, or complains.
        """


@cache
def find_reader() -> ListReader | None:
    """The reader that an installed distribution offers; None: Python reads.

    Read from the metadata of distributions when lists are first read, so that contracts import nothing above them. A reader changes the time
    that lists take and nothing else: one that cannot be imported, and several of which none has precedence, are left out with a warning.
    """
    from importlib import metadata  # needed by those alone who have lists

    try:
        offered = tuple(metadata.entry_points(group=READERS))
        if len(offered) == 1:
            return cast("ListReader", offered[0].load())
    except Exception as problem:  # noqa: BLE001 - whatever is wrong with an installation, Python reads the same values
        logger.warning(
            "Python reads lists, with the same results but slower: the reader in %s cannot be used (%s)", READERS, problem
        )
        return None
    if offered:
        owners = sorted(f"{point.dist.name if point.dist else point.name} ({point.value})" for point in offered)
        logger.warning("Python reads lists, with the same results but slower: %s offer one each; keep one", " and ".join(owners))
    return None


def from_lists(
    *,
    input_ids: Rows,
    num_actions: Sequence[int] | None,
    loss_mask: Rows | None,
    columns: Mapping[str, Rows],
    reader: ListReader | None = None,
) -> dict[str, Any]:
    """The flat arrays of `SampleColumns.create`; see `SampleColumns.from_lists`."""
    reader = find_reader() if reader is None else reader
    count = len(input_ids)
    tokens, lengths = flat_token_ids(input_ids, lambda row: (row, "input_ids"), reader)
    weight, mask_lengths = (None, None) if loss_mask is None else flat_loss_weight("loss_mask", loss_mask, count, reader)
    actions = lengths if mask_lengths is None else mask_lengths
    if num_actions is not None:
        actions = _counts("num_actions", num_actions, count)
    if mask_lengths is not None:
        check_lengths("loss_mask", mask_lengths, actions)
    return {
        "input_ids": tokens,
        "token_offsets": offsets_of(lengths),
        "action_offsets": offsets_of(actions),
        "loss_weight": weight,
        "columns": {name: _column(name, rows, count, actions, reader) for name, rows in columns.items()},
    }


def from_rollouts(
    *,
    prompts: Rows,
    responses: Rows,
    loss_masks: Rows | None,
    columns: Mapping[str, Rows],
    reader: ListReader | None = None,
) -> dict[str, Any]:
    """The flat arrays of `SampleColumns.create`; see `SampleColumns.from_rollouts`."""
    reader = find_reader() if reader is None else reader
    count = len(prompts)
    _check_rows("responses", responses, count)
    pairs: list[Any] = [None] * (2 * count)
    pairs[0::2], pairs[1::2] = prompts, responses
    tokens, lengths = flat_token_ids(pairs, lambda row: (row // 2, "responses" if row % 2 else "prompts"), reader)
    prompt_lengths, actions = lengths[0::2], lengths[1::2]
    weight = None
    if loss_masks is not None:
        weight, mask_lengths = flat_loss_weight("loss_masks", loss_masks, count, reader)
        check_lengths("loss_masks", mask_lengths, actions)
    return {
        "input_ids": tokens,
        "token_offsets": offsets_of(prompt_lengths + actions),
        "action_offsets": offsets_of(actions),
        "loss_weight": weight,
        "columns": {name: _column(name, rows, count, actions, reader) for name, rows in columns.items()},
    }


def flat_token_ids(rows: Rows, place: Callable[[int], tuple[int, str]], reader: ListReader | None) -> tuple[AnyArray, IntArray]:
    """All ids, int32 where they fit and int64 otherwise, and the rows' lengths; `place(row)` is (sample, field) for messages."""
    for typecode, dtype in (("i", np.int32), ("q", np.int64)):
        try:
            return _flat(rows, typecode, dtype, place, reader)
        except OverflowError:
            continue
    raise DataError(
        "a token id needs more than 64 bits", remedy="Check that input_ids holds token ids of the tokenizer, not hashes"
    )


def flat_numbers(name: str, rows: Rows, count: int, reader: ListReader | None) -> tuple[AnyArray, IntArray]:
    """All numbers as float32, and the rows' lengths."""
    _check_rows(name, rows, count)
    try:
        return _flat(rows, "f", np.float32, lambda row: (row, name), reader)
    except OverflowError as problem:
        raise DataError(f"{name} holds an integer that no float can hold", remedy=f"Check the values of {name}") from problem


def flat_loss_weight(name: str, rows: Rows, count: int, reader: ListReader | None) -> tuple[AnyArray, IntArray]:
    """All weights as `as_loss_weight` gives them, and the rows' lengths."""
    _check_rows(name, rows, count)
    mask = _read_at_once(rows, np.uint8, reader)
    if mask is not None:
        return mask
    values, lengths = flat_numbers(name, rows, count, reader)
    return as_loss_weight(values), lengths


def as_loss_weight(values: AnyArray) -> AnyArray:
    """uint8 where every weight is 0 or 1, float32 otherwise (also for -0.0, which uint8 would not keep)."""
    is_mask = bool((((values == 0) & ~np.signbit(values)) | (values == 1)).all())
    return values.astype(np.uint8) if is_mask else values.astype(np.float32, copy=False)


def check_lengths(name: str, lengths: IntArray, actions: IntArray) -> None:
    """Raises DataError for the first sample whose `name` does not have one value per response token."""
    wrong = lengths != actions
    if wrong.any():
        sample = int(np.argmax(wrong))
        raise DataError(
            f"sample {sample} has {int(lengths[sample])} values in {name} for {int(actions[sample])} response tokens",
            remedy=f"Give {name} exactly one value per response token",
        )


def _flat(
    rows: Rows,
    typecode: str,
    dtype: type[np.generic],
    place: Callable[[int], tuple[int, str]],
    reader: ListReader | None,
) -> tuple[AnyArray, IntArray]:
    """Append row after row to one growing buffer. `array.fromlist` reads Python numbers at C speed and refuses what is no number."""
    at_once = _read_at_once(rows, dtype, reader)
    if at_once is not None:
        return at_once
    buffer = array(typecode)
    assert buffer.itemsize == np.dtype(dtype).itemsize, f"the platform's {typecode!r} is not {np.dtype(dtype)}"
    ends = np.zeros(len(rows) + 1, dtype=np.int64)
    for number, row in enumerate(rows):
        try:
            if type(row) is list:
                buffer.fromlist(row)
            else:
                _append(buffer, row, np.dtype(dtype))
        except (TypeError, ValueError) as problem:
            sample, name = place(number)
            raise DataError(
                f"sample {sample} has something in {name} that cannot be read: {problem}",
                remedy=f"Give {name} one flat list, NumPy array or tensor of "
                f"{'whole numbers' if typecode != 'f' else 'numbers'} per sample",
            ) from problem
        ends[number + 1] = len(buffer)
    return np.frombuffer(buffer, dtype=dtype) if len(buffer) else np.zeros(0, dtype=dtype), np.diff(ends)


def _read_at_once(rows: Rows, dtype: type[np.generic], reader: ListReader | None) -> tuple[AnyArray, IntArray] | None:
    """All values and the rows' lengths from `reader`, or None where there is none or it does not read these rows."""
    return None if reader is None else reader(list(rows), dtype)


def _append(buffer: "array[Any]", row: Any, dtype: np.dtype[Any]) -> None:
    """Append an array, tensor or any other iterable of numbers. Raises OverflowError for an id that `dtype` cannot hold."""
    if hasattr(row, "detach"):  # a torch tensor, on any device, with or without gradient; torch is not imported for the others
        row = row.detach().cpu()
        row = (row.float() if row.is_floating_point() else row).numpy()
    if not isinstance(row, np.ndarray):
        if isinstance(row, str | bytes | Mapping) or not isinstance(row, Iterable):
            raise TypeError(f"it is {'missing' if row is None else type(row).__name__}")
        buffer.fromlist(list(row))
        return
    if row.ndim != 1:
        raise ValueError(f"an array of shape {list(row.shape)}")
    whole = dtype.kind == "i"
    if row.dtype.kind not in ("iu" if whole else "iufb") and len(row):
        raise TypeError(f"an array of {row.dtype}")
    if whole and len(row) and (int(row.max()) > np.iinfo(dtype).max or int(row.min()) < np.iinfo(dtype).min):
        raise OverflowError
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, as it does from a list
        buffer.frombytes(np.ascontiguousarray(row, dtype=dtype).view(np.uint8).data)


def _column(name: str, rows: Rows, count: int, actions: IntArray, reader: ListReader | None) -> AnyArray:
    if is_wide(rows):
        _check_rows(name, rows, count)
        return wide_column(name, rows, actions)
    values, lengths = flat_numbers(name, rows, count, reader)
    check_lengths(name, lengths, actions)
    return values


def _counts(name: str, counts: Sequence[int], samples: int) -> IntArray:
    _check_rows(name, counts, samples)
    values = np.asarray(counts)
    if values.dtype.kind not in "iu" and samples:
        raise DataError(f"{name} holds {values.dtype}, not whole numbers", remedy="Give the number of response tokens per sample")
    if (values < 0).any():
        raise DataError(
            f"sample {int(np.argmax(values < 0))} has a negative number in {name}", remedy="Give the number of response tokens"
        )
    return values.astype(np.int64)


def _check_rows(name: str, rows: Rows, count: int) -> None:
    if len(rows) != count:
        raise DataError(f"{name} has {len(rows)} rows for {count} samples", remedy="Give every sample its own row")
