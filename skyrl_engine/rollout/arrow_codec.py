"""Groups, and what a step learned from them, as Arrow record batches, and back: a row per attempt, every field to the last bit."""

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.values import rollout_columns
from skyrl_engine.contracts.values.ragged import AnyArray, offsets_of
from skyrl_engine.contracts.values.rollout import LARGEST_REWARD, Group, Trajectory, VersionSpans
from skyrl_engine.contracts.values.rollout_columns import RolloutColumn, list_further_columns, list_required_columns
from skyrl_engine.data.table import arrow_arrays
from skyrl_engine.errors import ContractError

if TYPE_CHECKING:
    import pyarrow as pa

_REQUIRED: Final[Mapping[str, type[np.generic]]] = {row.name: row.dtype for row in list_required_columns()}

_ARRAYS: Final[Mapping[str, type[np.generic]]] = {
    "token_ids": np.int32,
    "kinds": np.uint8,
    "segment_offsets": np.int64,
    "logprobs": _REQUIRED["logprobs"],
    "version_starts": np.int32,
    "versions": np.int64,
    "rewards": _REQUIRED["rewards"],
}
"""Array fields of a trajectory by column, in the order of the journal. In format 2 of the journal `rewards` are float32. What a step
learned follows, and then the columns that an environment may give."""

_FIRST_OF_TABLE: Final = 3
"""The format of the journal that has no column of the table beyond those of every attempt; each further row of the table is one format more."""

_LEARNED: Final[Mapping[str, type[np.generic]]] = {"advantages": np.float32, "trained_logprobs": np.float32}
"""Array fields of `Learned` by column, with their types."""

_NUMBERS: Final[Mapping[str, type[np.generic]]] = {
    "member": np.int64,
    "unplaced_reward": np.float64,
    "start_version": np.int64,
    "tool_problems": np.int64,
}
_DOCUMENT: Final = ("status", "cause", "success", "stops", "parts", "metrics", "info", "seconds")
"""Fields that are kept as one JSON object per attempt, in the column `document`."""
_DIALOGUE: Final = ("messages", "tools")
"""Fields that it holds where the attempt has them."""


@frozen(eq=False)
class LearnedAttempt:
    """Numbers by sampled token that a step computed, each float32[sampled]: advantages, and log-probabilities under its weights."""

    ticket: int
    member: int
    advantages: npt.NDArray[np.float32]
    trained_logprobs: npt.NDArray[np.float32]


def present_format() -> str:
    """Return the format that is written: it counts the rows of the table of rollout columns."""
    return str(_FIRST_OF_TABLE + len(list_further_columns()))


def formats() -> tuple[str, ...]:
    """Return the formats that are read, the newest first."""
    return tuple(map(str, range(int(present_format()), 1, -1)))


def schema(metadata: tuple[tuple[str, str], ...] = ()) -> "pa.Schema":
    """Return the schema of records, with what is to be said of the whole stream."""
    return _schema(list_further_columns(), metadata)


def schema_of_format(number: str) -> "pa.Schema":
    """Return the schema of records in a format that is read."""
    if number == "2":
        return schema_of_format_2()
    return _schema(list_further_columns()[: int(number) - _FIRST_OF_TABLE], ())


@cache
def _schema(further: tuple[RolloutColumn, ...], metadata: tuple[tuple[str, str], ...]) -> "pa.Schema":
    import pyarrow as pa

    fields = [pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in _NUMBERS.items()]
    lists = {**_ARRAYS, **_LEARNED, **{row.name: row.dtype for row in further}}.items()
    fields += [pa.field(name, pa.list_(pa.from_numpy_dtype(dtype)), nullable=False) for name, dtype in lists]
    fields.append(pa.field("document", pa.string(), nullable=False))
    return pa.schema(fields, metadata=dict(metadata))


@cache
def schema_of_format_2() -> "pa.Schema":
    """Return the schema of records in format 2 of the journal, whose rewards are float32."""
    import pyarrow as pa

    present = _schema((), ())
    return present.set(present.get_field_index("rewards"), pa.field("rewards", pa.list_(pa.float32()), nullable=False))


def convert_to_present_format(batch: "pa.RecordBatch") -> "tuple[pa.RecordBatch, int]":
    """Return the rows of an older format in this one, and the checksum of their values."""
    import pyarrow as pa

    nothing = pa.array([[]] * batch.num_rows, pa.list_(pa.float32()))
    arrays = [batch.column(name) if name in batch.schema.names else nothing for name in schema().names]
    batch = pa.RecordBatch.from_arrays(arrays, names=schema().names).cast(schema())
    return batch, 0 if batch.num_rows == 0 else checksum_of(columns_of(batch))


def no_rows() -> "pa.RecordBatch":
    """Return a batch without attempts."""
    return _batch({name: np.zeros(0, dtype=dtype) for name, dtype in _NUMBERS.items()}, {}, [])[0]


def batch_of(group: Group) -> "tuple[pa.RecordBatch, int]":
    """Return the group as a record batch, and the checksum of its values.

    Raises ContractError for values that are not finite or not JSON.
    """
    for trajectory in group.trajectories:
        _refuse_unfit(group, trajectory)
    numbers: dict[str, AnyArray] = {
        name: np.array([getattr(trajectory, name) for trajectory in group.trajectories], dtype=dtype)
        for name, dtype in _NUMBERS.items()
    }
    pieces = {name: [_array(trajectory, name) for trajectory in group.trajectories] for name in _ARRAYS}
    for row in list_further_columns():
        present = [trajectory.per_token(row) for trajectory in group.trajectories]
        pieces[row.name] = [np.zeros(0, dtype=row.dtype) if values is None else values for values in present]
    return _batch(numbers, pieces, [_document(group, trajectory) for trajectory in group.trajectories])


def encode_learned(learned: Sequence[LearnedAttempt]) -> "tuple[pa.RecordBatch, int]":
    """Return what a step learned as a record batch, and the checksum of its values."""
    numbers: dict[str, AnyArray] = {name: np.zeros(len(learned), dtype=dtype) for name, dtype in _NUMBERS.items()}
    numbers["member"] = np.array([attempt.member for attempt in learned], dtype=np.int64)
    pieces = {name: [getattr(attempt, name) for attempt in learned] for name in _LEARNED}
    return _batch(numbers, pieces, [""] * len(learned))


def _batch(
    numbers: Mapping[str, AnyArray], pieces: Mapping[str, Sequence[AnyArray]], documents: Sequence[str]
) -> "tuple[pa.RecordBatch, int]":
    """Return rows as a record batch, and the checksum of their values; lists without `pieces` are empty."""
    import pyarrow as pa

    ragged: dict[str, tuple[AnyArray, npt.NDArray[np.int32]]] = {}
    further = {row.name: row.dtype for row in list_further_columns()}
    for name, dtype in {**_ARRAYS, **_LEARNED, **further}.items():
        column_pieces = pieces.get(name, [np.zeros(0, dtype=dtype)] * len(documents))
        offsets = offsets_of([len(piece) for piece in column_pieces]).astype(np.int32)
        ragged[name] = np.concatenate(column_pieces) if column_pieces else np.zeros(0, dtype=dtype), offsets
    arrays = [arrow_arrays.numbers(values) for values in numbers.values()]
    for values, offsets in ragged.values():
        arrays.append(pa.ListArray.from_arrays(arrow_arrays.numbers(offsets), arrow_arrays.numbers(values)))
    arrays.append(arrow_arrays.texts(documents))
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema())
    crc = 0
    if documents:
        crc = checksum_of([*numbers.values(), *(array for pair in ragged.values() for array in pair), *_texts(documents)])
    return batch, crc


def _array(trajectory: Trajectory, name: str) -> AnyArray:
    if name == "version_starts":
        return trajectory.versions.starts
    array: AnyArray = trajectory.versions.versions if name == "versions" else getattr(trajectory, name)
    return array


def _refuse_unfit(group: Group, trajectory: Trajectory) -> None:
    """Raise ContractError for values that are not finite, and AssertionError for arrays that are not what the contract says."""
    place = f"attempt {trajectory.member} at task {group.task_key!r} of {group.environment} (group {group.ticket})"
    assert trajectory.ticket == group.ticket, f"{place} is of group {trajectory.ticket}"
    for name, dtype in _ARRAYS.items():
        array = _array(trajectory, name)
        assert array.ndim == 1, f"{place}: {name} has the shape {array.shape}"
        assert array.dtype == dtype, f"{place}: {name} is {array.dtype}, not {np.dtype(dtype)}"
    for row in rollout_columns.ROLLOUT_COLUMNS:
        values = trajectory.per_token(row)
        if values is None:
            continue
        assert values.shape == trajectory.logprobs.shape, f"{place}: {row.name} has the shape {values.shape}"
        assert values.dtype == row.dtype, f"{place}: {row.name} is {values.dtype}, not {np.dtype(row.dtype)}"
        fits = np.isfinite(values) & (np.abs(values) <= row.largest)
        if not fits.all():
            at = int(np.argmin(fits))
            raise ContractError(
                f"{place}: {row.name}[{at}] is {values[at]}",
                remedy="Give finite numbers: an attempt that cannot be scored has failed",
            )
    if not abs(trajectory.unplaced_reward) <= LARGEST_REWARD:
        raise ContractError(f"{place}: its reward is {trajectory.unplaced_reward}", remedy="Give finite rewards")


def _document(group: Group, trajectory: Trajectory) -> str:
    values = {name: getattr(trajectory, name) for name in _DOCUMENT}
    values |= {name: kept for name in _DIALOGUE if (kept := getattr(trajectory, name))}
    try:
        return json.dumps(values, allow_nan=False, default=_to_json)
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"attempt {trajectory.member} at task {group.task_key!r} of {group.environment} (group {group.ticket}) reports a value that is not "
            f"JSON ({error})",
            remedy="Return plain finite values in parts, metrics and info",
        ) from error


def _to_json(value: object) -> object:
    """Return a NumPy number, or a mapping of another class, as what JSON knows."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _texts(documents: Sequence[str]) -> tuple[AnyArray, bytes]:
    """Return texts as what a checksum is made of: their lengths, int64, and all of them."""
    encoded = [document.encode() for document in documents]
    return np.array([len(text) for text in encoded], dtype=np.int64), b"".join(encoded)


def columns_of(batch: "pa.RecordBatch") -> list[AnyArray | bytes]:
    """Return the values of a batch as they were when it was made; those of format 2 without the lengths of documents."""
    columns: list[AnyArray | bytes] = [arrow_arrays.values_of(batch.column(name)) for name in _NUMBERS]
    further = [row.name for row in list_further_columns() if row.name in batch.schema.names]
    for name in (*_ARRAYS, *_LEARNED, *further):
        column = batch.column(name)
        columns += [arrow_arrays.values_of(column.values), arrow_arrays.values_of(column.offsets)]
    lengths, texts = _texts(batch.column("document").to_pylist())
    return [*columns, texts] if batch.schema.equals(schema_of_format_2()) else [*columns, lengths, texts]


def checksum_of(values: Sequence[AnyArray | bytes]) -> int:
    """Return the CRC-32 over values in their order."""
    crc = 0
    for value in values:
        crc = zlib.crc32(value if isinstance(value, bytes) else np.ascontiguousarray(value).data, crc)
    return crc


def group_of(batch: "pa.RecordBatch", header: Mapping[str, Any]) -> Group:
    """Return the group of a batch; `header` says what belongs to all of it."""
    ticket = int(header["ticket"])
    columns = {name: _pieces(batch, name, dtype) for name, dtype in _ARRAYS.items()}
    further = {row.name: _pieces(batch, row.name, row.dtype) for row in list_further_columns() if row.name in batch.schema.names}
    numbers = {name: batch.column(name).to_pylist() for name in _NUMBERS}
    documents = [json.loads(text) for text in batch.column("document").to_pylist()]
    trajectories = []
    for row, document in enumerate(documents):
        arrays: dict[str, Any] = {name: values[row] for name, values in columns.items()}
        versions = VersionSpans(arrays.pop("version_starts"), arrays.pop("versions"))
        plain: dict[str, Any] = {name: values[row] for name, values in numbers.items()}
        plain["columns"] = {name: values[row] for name, values in further.items() if len(values[row])}
        trajectories.append(
            Trajectory(ticket=ticket, versions=versions, **arrays, **plain, **{**document, "stops": tuple(document["stops"])})
        )
    return Group(
        ticket, header["environment"], header["task_key"], int(header["start_version"]), tuple(trajectories), header["dropped"]
    )


def tokens_of(batch: "pa.RecordBatch") -> list[npt.NDArray[np.int32]]:
    """Return the tokens of every attempt of a batch."""
    return _pieces(batch, "token_ids", np.int32)


def decode_learned(batch: "pa.RecordBatch", header: Mapping[str, Any]) -> list[LearnedAttempt]:
    """Return what a step learned; `header` says how many attempts of each ticket there are."""
    tickets = np.repeat(np.array(header["tickets"], dtype=np.int64), header["attempts"]).tolist()
    columns = [_pieces(batch, name, dtype) for name, dtype in _LEARNED.items()]
    return [LearnedAttempt(*fields) for fields in zip(tickets, batch.column("member").to_pylist(), *columns, strict=True)]


def _pieces(batch: "pa.RecordBatch", name: str, dtype: type[np.generic]) -> list[AnyArray]:
    """Return the list of every row, as `dtype`: an older format may hold narrower numbers."""
    column = batch.column(name)
    values, offsets = arrow_arrays.values_of(column.values).astype(dtype, copy=False), arrow_arrays.values_of(column.offsets)
    return [values[start:end] for start, end in pairwise(offsets)]
