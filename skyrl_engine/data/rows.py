"""Rows of a dataset, with the file and line that each came from."""

import gzip
import hashlib
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from skyrl_engine.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

BoolArray = npt.NDArray[np.bool_]

_ROWS_PER_READ = 1024


@frozen
class Row:
    """`number` counts from 0 over the whole source; `where` names file and line or row, for messages. Lists of numbers are NumPy arrays."""

    number: int
    where: str
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"sample {self.number} ({self.where})"

    def wrong(self, column: str, what: str, remedy: str) -> DataError:
        """The error for a value of this row."""
        return DataError(f"{self.name}, column {column!r}: {what}", remedy=remedy)


def kind_of(value: object) -> str:
    """The kind of a value, in an error."""
    return "nothing" if value is None else type(value).__name__


def listed(names: Iterable[str]) -> str:
    """Names of columns, in an error."""
    return ", ".join(map(repr, names)) or "none"


@frozen
class Scan:
    """What one pass over a part tells: a digest of its content and how many rows it holds."""

    digest: str
    rows: int


class Part(ABC):
    """One file, or one ready-made dataset, of a source."""

    @abstractmethod
    def scan(self) -> Scan:
        """Read the content once, for the cache key and the number of rows."""

    @abstractmethod
    def read(self) -> Iterator[tuple[str, "Mapping[str, Any] | bytes"]]:
        """Every row in order: where it is, and its values or its JSON text, which is parsed only for the rows that are wanted."""


@frozen
class JsonLines(Part):
    """One JSON object per line; blank lines are passed over. `.gz` is unpacked."""

    path: Path

    def scan(self) -> Scan:
        digest, rows = hashlib.sha256(), 0
        for line in self._lines():
            digest.update(line)
            rows += bool(line.strip())
        return Scan(digest.hexdigest(), rows)

    def read(self) -> Iterator[tuple[str, bytes]]:
        for number, line in enumerate(self._lines(), start=1):
            if line.strip():
                yield f"{self.path} line {number}", line

    def _lines(self) -> Iterator[bytes]:
        packed = self.path.suffix.lower() == ".gz"
        try:
            with gzip.open(self.path, "rb") if packed else self.path.open("rb") as file:
                yield from file
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(self.path, "packed JSON lines" if packed else "JSON lines", error) from error


@frozen
class JsonArray(Part):
    """A file holding one JSON array of objects, read whole."""

    path: Path

    def scan(self) -> Scan:
        return Scan(_file_digest(self.path), len(self._load()))

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, values in enumerate(self._load()):
            where = f"{self.path} element {number}"
            yield where, _checked_object(values, where)

    def _load(self) -> list[Any]:
        try:
            values = json.loads(self.path.read_bytes())
        except OSError as error:
            raise _unreadable(self.path, "JSON", error) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.path} is not valid JSON: {error}", remedy="Correct the file, or store one object per line as .jsonl"
            ) from error
        if not isinstance(values, list):
            raise DataError(
                f"{self.path} does not hold an array of objects", remedy="Store a JSON array, or one object per line as .jsonl"
            )
        return values


@frozen
class ParquetFile(Part):
    """A Parquet file, read in batches."""

    path: Path

    def scan(self) -> Scan:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows = pq.read_metadata(self.path).num_rows
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self.path, "Parquet", error) from error
        return Scan(_file_digest(self.path), rows)

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path) as file:
                yield from _batch_rows(file.iter_batches(batch_size=_ROWS_PER_READ), str(self.path))
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self.path, "Parquet", error) from error


@frozen
class ArrowFile(Part):
    """An Arrow IPC file or stream (told apart by the file's first bytes), memory-mapped."""

    path: Path

    def scan(self) -> Scan:
        return Scan(_file_digest(self.path), sum(batch.num_rows for batch in self._batches()))

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return _batch_rows(self._batches(), str(self.path))

    def _batches(self) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        try:
            with pa.memory_map(str(self.path)) as file:
                if file.read(6) == b"ARROW1":
                    reader = pa.ipc.open_file(file)
                    for number in range(reader.num_record_batches):
                        yield reader.get_batch(number)
                else:
                    file.seek(0)
                    yield from pa.ipc.open_stream(file)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self.path, "Arrow", error) from error


@frozen(eq=False)
class LoadedDataset(Part):
    """A split of a Hugging Face dataset. `digest` stands for its content."""

    name: str
    dataset: Any
    digest: str

    def scan(self) -> Scan:
        return Scan(self.digest, len(self.dataset))

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        tables = self.dataset.with_format("arrow").iter(batch_size=_ROWS_PER_READ)
        return _batch_rows((batch for table in tables for batch in table.to_batches()), self.name)


@frozen(eq=False)
class Source:
    """A dataset split: its parts in order. `name` is what the user called it."""

    name: str
    parts: Sequence[Part]
    _scans: list[Scan] = field(factory=list, init=False)

    def scan(self) -> Sequence[Scan]:
        """One scan per part, made once."""
        if not self._scans:
            self._scans.extend(part.scan() for part in self.parts)
        return self._scans

    def __len__(self) -> int:
        return sum(scan.rows for scan in self.scan())

    @property
    def digest(self) -> str:
        """sha256 over the content of all parts in order."""
        return hashlib.sha256("\n".join(scan.digest for scan in self.scan()).encode()).hexdigest()

    def rows(self, wanted: BoolArray | None = None) -> Iterator[Row]:
        """The rows marked in `wanted` bool[rows] (None: all) in order; others are not parsed. Raises DataError naming file and line."""
        end = None if wanted is None else int(np.max(np.flatnonzero(wanted), initial=-1)) + 1
        number = 0
        for part in self.parts:
            for where, content in part.read():
                if end is not None and number >= end:
                    return
                if wanted is None or wanted[number]:
                    values = _parsed(content, where) if isinstance(content, bytes) else content
                    yield Row(number, where, values)
                number += 1


def _parsed(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not valid JSON: {error.msg} at character {error.pos + 1}", remedy="Correct or remove that line"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error.reason} at byte {error.start}", remedy="Save the file as UTF-8") from error
    return _checked_object(values, where)


def _checked_object(values: object, where: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise DataError(
            f"{where} holds a JSON {type(values).__name__} where an object with columns is needed",
            remedy="Store one object per sample",
        )
    return values


def _batch_rows(batches: "Iterator[pa.RecordBatch]", name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    number = 0
    for whole in batches:
        for start in range(0, whole.num_rows, _ROWS_PER_READ):
            batch = whole.slice(start, _ROWS_PER_READ)
            columns = {column: _column_values(batch.column(index)) for index, column in enumerate(batch.schema.names)}
            for row in range(batch.num_rows):
                yield f"{name} row {number}", {column: values[row] for column, values in columns.items()}
                number += 1


def _column_values(array: "pa.Array") -> Sequence[Any]:
    """One value per row: NumPy views for lists of numbers, Python objects for everything else."""
    import pyarrow as pa

    kind = array.type
    if (
        (pa.types.is_list(kind) or pa.types.is_large_list(kind))
        and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))
        and array.null_count == 0
        and array.values.null_count == 0
    ):
        values, offsets = array.values.to_numpy(), array.offsets.to_numpy()
        return [values[start:stop] for start, stop in pairwise(offsets)]
    return [_without_nulls(value) for value in array.to_pylist()]


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all the keys that any row has; keys that are null here were not written by the user."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, "data", error) from error


def _unreadable(path: Path, kind: str, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read as {kind}: {str(error).rstrip('.')}",
        remedy="Check that the file is complete and named after its format",
    )
