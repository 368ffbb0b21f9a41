"""Arrow tables as flat columns: the list arrays' own memory where a column is one chunk of the right type, never Python lists."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skyrl_engine.contracts.values.extras import EXPERT_ROUTES, OF_IMAGES
from skyrl_engine.contracts.values.ingest import as_loss_weight, check_lengths
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged, offsets_of
from skyrl_engine.errors import DataError

EXTRAS = (EXPERT_ROUTES, *OF_IMAGES)


def from_arrow(table: Any, *, columns: Sequence[str], sample_values: Sequence[str]) -> dict[str, Any]:
    """The arguments of `SampleColumns.create`; see `SampleColumns.from_arrow`."""
    arrays = _by_name(table)
    tokens, lengths = _lists("input_ids", _require_column(arrays, "input_ids"))
    weight, mask_lengths = _lists("loss_mask", arrays["loss_mask"]) if "loss_mask" in arrays else (None, None)
    if "num_actions" in arrays:
        actions = _integers("num_actions", _scalars("num_actions", arrays["num_actions"])).astype(np.int64, copy=False)
        if (actions < 0).any():
            raise DataError(
                f"sample {int(np.argmax(actions < 0))} has a negative number in num_actions",
                remedy="Give the number of response tokens",
            )
    else:
        actions = lengths if mask_lengths is None else mask_lengths
    if mask_lengths is not None:
        check_lengths("loss_mask", mask_lengths, actions)
    arguments: dict[str, Any] = {
        "input_ids": _integers("input_ids", tokens),
        "token_offsets": offsets_of(lengths),
        "action_offsets": offsets_of(actions),
        "loss_weight": None if weight is None else _weight(weight),
        "columns": {name: _action_column(name, _require_column(arrays, name), actions) for name in columns},
        "sample_values": {name: _scalars(name, _require_column(arrays, name)) for name in sample_values},
    }
    for name in ("sample_ids", "group_ids", "unit_ids"):
        if name in arrays:
            arguments[name] = _integers(name, _scalars(name, arrays[name]))
    extras = {name: _read_nested_lists(name, arrays[name]) for name in EXTRAS if name in arrays}
    # Lists that are all empty do not say how wide their entries are: nobody has an image. Routes, every sample must have.
    arguments["extras"] = {
        name: ragged for name, ragged in extras.items() if len(ragged.values) or (name == EXPERT_ROUTES and len(ragged))
    }
    return arguments


def values_of(array: Any) -> AnyArray:
    """Return the numbers of an array [n], of any type but bool, without a copy. Raises ValueError where some are missing.

    `to_numpy` would import pandas where that is installed, which costs a process a second of CPU time and 50 MB.
    """
    if array.null_count:
        raise ValueError(f"{array.null_count} numbers are missing")
    dtype = np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(0, dtype=dtype)
    values = np.frombuffer(buffer, dtype=dtype, count=len(array), offset=array.offset * dtype.itemsize)
    # Arrow's arrays are nobody's to change
    values.flags.writeable = False
    return values


def _to_numpy(array: Any) -> AnyArray:
    """Return the values of an array without missing ones; copies only what is stored as bits."""
    import pyarrow as pa

    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    return values_of(array) if is_number else array.to_numpy(zero_copy_only=False)


def _by_name(table: Any) -> dict[str, Any]:
    import pyarrow as pa

    if isinstance(table, pa.Table | pa.RecordBatch):
        return {name: table.column(name) for name in table.schema.names}
    if isinstance(table, Mapping):
        return dict(table)
    if isinstance(table, pa.Array | pa.ChunkedArray):
        return {"input_ids": table}
    raise DataError(
        f"columns are read from an Arrow table, record batch or list array, not from {type(table).__name__}",
        remedy='Pass a pyarrow.Table (a Hugging Face dataset gives one with `dataset.with_format("arrow")[:]`)',
    )


def _require_column(arrays: Mapping[str, Any], name: str) -> Any:
    if name not in arrays:
        raise DataError(f"the table has no column {name!r}; it has {sorted(arrays)}", remedy=f"Add or rename the column {name!r}")
    return arrays[name]


def _chunks(array: Any) -> list[Any]:
    import pyarrow as pa

    if not isinstance(array, pa.ChunkedArray):
        return [array]
    return list(array.chunks) or [pa.array([], type=array.type)]


def _lists(name: str, array: Any) -> tuple[AnyArray, IntArray]:
    """The values of a list column, flat, and the rows' lengths."""
    import pyarrow as pa

    kind = array.type
    if not _is_list(kind):
        raise DataError(f"column {name!r} holds {kind}, not lists", remedy=f"Give {name} one list of numbers per sample")
    values, lengths, before = [], [], 0
    for chunk in _chunks(array):
        _refuse_null(name, chunk, before)
        if pa.types.is_fixed_size_list(kind):
            flat, sizes = chunk.flatten(), np.full(len(chunk), kind.list_size, dtype=np.int64)
        else:
            offsets = values_of(chunk.offsets).astype(np.int64, copy=False)  # a slice's own; they need not start at 0
            flat, sizes = chunk.values.slice(offsets[0], offsets[-1] - offsets[0]), np.diff(offsets)
        if flat.null_count:
            place = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
            sample = before + int(np.searchsorted(np.cumsum(sizes), place, side="right"))
            raise DataError(f"sample {sample} has an empty value in {name}", remedy=f"Fill or drop the missing values of {name}")
        values.append(_to_numpy(flat))
        lengths.append(sizes)
        before += len(chunk)
    return _concatenate(values), _concatenate(lengths)


def _read_nested_lists(name: str, array: Any) -> Ragged:
    """Lists of lists, all inner ones of one length, as flat values [total, ...]; a sample without a list has none of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks = [chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk for chunk in _chunks(array)]
    joined = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    if pa.types.is_null(joined.type):
        return Ragged(np.zeros(0), np.zeros(len(joined) + 1, dtype=np.int64))
    if not _is_list(joined.type):
        raise DataError(f"column {name!r} holds {joined.type}, not lists", remedy=f"Give {name} one list per sample")
    offsets = offsets_of(pc.list_value_length(joined).fill_null(0).to_numpy(zero_copy_only=False))
    flat = joined.flatten()
    width: list[int] = []
    while _is_list(flat.type):
        sizes = pc.list_value_length(flat).fill_null(-1).to_numpy(zero_copy_only=False)
        _refuse_places(name, sizes != sizes[:1], offsets, width, "lists of different lengths")
        width.append(int(sizes[0]) if len(sizes) else 0)
        flat = flat.flatten()
    if flat.null_count:
        _refuse_places(name, flat.is_null().to_numpy(zero_copy_only=False), offsets, width, "an empty value")
    return Ragged(_to_numpy(flat).reshape(int(offsets[-1]), *width), offsets)


def _refuse_places(name: str, wrong: AnyArray, offsets: IntArray, width: list[int], what: str) -> None:
    """Raise for the first place marked, counted in entries of [total, *width]."""
    if wrong.any():
        sample = int(np.searchsorted(offsets, np.argmax(wrong) // math.prod(width), side="right")) - 1
        raise DataError(f"sample {sample} has {what} in {name}", remedy=f"Give {name} as full arrays of one shape per entry")


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _scalars(name: str, array: Any) -> AnyArray:
    before, values = 0, []
    for chunk in _chunks(array):
        _refuse_null(name, chunk, before)
        values.append(_to_numpy(chunk))
        before += len(chunk)
    return _concatenate(values)


def _refuse_null(name: str, chunk: Any, before: int) -> None:
    if chunk.null_count:
        sample = before + int(np.argmax(chunk.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(f"sample {sample} has no {name}", remedy=f"Fill {name} or drop the sample")


def _concatenate(parts: list[AnyArray]) -> AnyArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _integers(name: str, values: AnyArray) -> AnyArray:
    """int32 or int64, without a copy where it is one of them."""
    if values.dtype.kind not in "iu":
        raise DataError(f"{name} holds {values.dtype}, not whole numbers", remedy=f"Store {name} as integers")
    if values.dtype == np.uint64 and len(values) and int(values.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{name} holds a number above 64 bits signed", remedy=f"Store {name} as int64")
    if values.dtype in (np.int32, np.int64):
        return values
    return values.astype(np.int32 if values.dtype.itemsize <= 2 else np.int64)


def _weight(values: AnyArray) -> AnyArray:
    if values.dtype.kind not in "iufb":
        raise DataError(f"loss_mask holds {values.dtype}, not numbers", remedy="Store loss_mask as booleans, integers or floats")
    if values.dtype in (np.uint8, np.float32):
        return values
    return values.astype(np.uint8) if values.dtype == np.bool_ else as_loss_weight(values)


def _action_column(name: str, array: Any, actions: IntArray) -> AnyArray:
    if _is_list(array.type) and _is_list(array.type.value_type):
        nested = _read_nested_lists(name, array)
        check_lengths(name, nested.lengths, actions)
        whole = nested.values.dtype.kind in "iu"
        return nested.values.astype(np.int64 if whole else np.float32, copy=False)
    values, lengths = _lists(name, array)
    if values.dtype.kind not in "iufb":
        raise DataError(f"column {name!r} holds {values.dtype}, not numbers", remedy=f"Store {name} as floats")
    check_lengths(name, lengths, actions)
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite
        return values.astype(np.float32, copy=False)
