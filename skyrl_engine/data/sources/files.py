"""Parts of a dataset: files of several formats, and datasets that were loaded already."""

import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
from attrs import field, frozen

from skyrl_engine.contracts.values.ragged import IntArray, offsets_of
from skyrl_engine.errors import DataError
from skyrl_engine.object_store.remote_file import RemoteFile

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_PER_READ = 1024

Content = Mapping[str, Any] | bytes
"""A row's values, or its JSON text."""

DataFile = Path | RemoteFile
"""A file on this machine, or of an object store."""


@frozen
class ShardCursor:
    """A place between two rows of a shard: the number of rows, or of lines, before it, and of bytes where these count."""

    row: int = 0
    place: int = 0


ShardRow = tuple[ShardCursor, ShardCursor, str, Content]
"""A row of a shard: the cursor before it and after it, its place for messages, and its content."""


@frozen
class Scan:
    """The result of one pass over a part: a digest of its content and its number of rows."""

    digest: str
    rows: int


class DatasetPart(ABC):
    """One file, or one ready-made dataset, of a source: of one that is streamed, a shard."""

    @property
    @abstractmethod
    def folder(self) -> Path | None:
        """Return the folder that relative paths in the rows start from; None where there is none."""

    @property
    def identity(self) -> str:
        """Tell the part from others, and from one that was changed; of files without reading them."""
        return self.scan().digest

    @property
    def size(self) -> int | None:
        """Return its bytes; None where that is not known."""
        return None

    @abstractmethod
    def scan(self) -> Scan:
        """Read the content once, for the cache key and the number of rows."""

    @abstractmethod
    def read(self) -> Iterator[tuple[str, Content]]:
        """Yield every row in order: its place, and its values or its JSON text, which is parsed only for wanted rows."""

    @abstractmethod
    def at(self, index: int) -> tuple[str, Content]:
        """Return the same for row `index` alone, without reading earlier rows. Raises DataError where the format does not allow that."""

    def read_from(self, cursor: ShardCursor) -> Iterator[ShardRow]:
        """Yield the rows after a cursor that this part gave, or all after the first one. Raises DataError."""
        for number, (where, content) in enumerate(self.read()):
            if number >= cursor.row:
                yield ShardCursor(number), ShardCursor(number + 1), where, content


class FilePart(DatasetPart):
    """A part that is a file of its own."""

    path: DataFile

    @property
    def folder(self) -> Path | None:
        return self.path.parent if isinstance(self.path, Path) else None

    @property
    def identity(self) -> str:
        return f"{self.path.name} {self.size}"

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@frozen
class JsonLines(FilePart):
    """One JSON object per line; blank lines are passed over. `.gz` is unpacked."""

    path: DataFile

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

    def read_from(self, cursor: ShardCursor) -> Iterator[ShardRow]:
        """Yield the lines after a cursor, which counts lines, blank ones too, and bytes of the file when unpacked."""
        row, place = cursor.row, cursor.place
        for line in self._lines(place):
            here, row, place = ShardCursor(row, place), row + 1, place + len(line)
            if line.strip():
                yield here, ShardCursor(row, place), f"{self.path} line {row}", line

    def at(self, index: int) -> tuple[str, bytes]:
        if self._packed:
            raise DataError(
                f"{self.path} is packed, and images inside its rows are read in any order", remedy="Unpack the file, or store paths"
            )
        numbers, starts = self._places
        try:
            with self.path.open("rb") as file:
                file.seek(int(starts[index]))
                return f"{self.path} line {int(numbers[index])}", file.readline()
        except OSError as error:
            raise _unreadable(self.path, "JSON lines", error) from error

    @cached_property
    def _places(self) -> tuple[IntArray, IntArray]:
        """Return int64[rows] twice: the number, from 1, and the first byte of every line that is not blank."""
        filled, lengths = [], []
        for line in self._lines():
            filled.append(bool(line.strip()))
            lengths.append(len(line))
        numbers = np.flatnonzero(filled)
        return numbers + 1, offsets_of(lengths)[:-1][numbers]

    @property
    def _packed(self) -> bool:
        return self.path.suffix.lower() == ".gz"

    def _open(self) -> IO[bytes]:
        if not self._packed:
            return self.path.open("rb")
        return cast("IO[bytes]", gzip.open(self.path if isinstance(self.path, Path) else self.path.open("rb"), "rb"))

    def _lines(self, start: int = 0) -> Iterator[bytes]:
        try:
            with self._open() as file:
                file.seek(start)
                yield from file
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(self.path, "packed JSON lines" if self._packed else "JSON lines", error) from error


@frozen
class JsonArray(FilePart):
    """A file holding one JSON array of objects, read whole."""

    path: DataFile

    def scan(self) -> Scan:
        return Scan(_file_digest(self.path), len(self._load()))

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, values in enumerate(self._load()):
            where = f"{self.path} element {number}"
            yield where, _check_object(values, where)

    def at(self, index: int) -> tuple[str, Mapping[str, Any]]:
        where = f"{self.path} element {index}"
        return where, _check_object(self._kept[index], where)

    @cached_property
    def _kept(self) -> list[Any]:
        return self._load()

    def _load(self) -> list[Any]:
        try:
            values = _JSON.decode(self.path.read_text("utf-8-sig"))
        except OSError as error:
            raise _unreadable(self.path, "JSON", error) from error
        except _RepeatedKeyError as error:
            raise error.at(str(self.path)) from error
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
class CsvFile(FilePart):
    """A CSV file whose first line names the columns. Every value is text; separated by commas, or by the tabs or semicolons of that line."""

    path: DataFile

    def scan(self) -> Scan:
        return Scan(_file_digest(self.path), sum(1 for _ in self.read()))

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        csv.field_size_limit(sys.maxsize)  # of the process; conversations are longer than the 128 KiB of the standard
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                yield from self._rows(file)
        except OSError as error:
            raise _unreadable(self.path, "CSV", error) from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path} is not UTF-8: {error.reason} at byte {error.start}", remedy="Save the file as UTF-8"
            ) from error

    def at(self, index: int) -> tuple[str, Mapping[str, Any]]:
        return self._kept[index]

    @cached_property
    def _kept(self) -> list[tuple[str, Mapping[str, Any]]]:
        return list(self.read())

    def _rows(self, file: IO[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        first = file.readline()
        file.seek(0)
        delimiter = next((mark for mark in (",", "\t", ";") if mark in first), ",")
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        start = 1
        try:
            names = next(lines, [])
            if "" in names or len(set(names)) != len(names) or not names:
                raise DataError(
                    f"{self.path} line 1 does not name its columns, each by a name of its own: {', '.join(map(repr, names)) or 'nothing'}",
                    remedy="Write the names of the columns into the first line",
                )
            start = lines.line_num + 1
            for cells in lines:
                where, start = f"{self.path} line {start}", lines.line_num + 1
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise DataError(
                        f"{where} has {len(cells)} values for {len(names)} columns",
                        remedy="Put values that hold separators or line ends in double quotes",
                    )
                yield where, dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise DataError(
                f"{self.path} line {start} is not valid CSV: {error}",
                remedy="Double the quotes inside quoted values, and close every quote",
            ) from error


@frozen
class ParquetFile(FilePart):
    """A Parquet file, read in batches; a single row is read with its row group, and the last such group is kept."""

    path: DataFile
    _group: dict[int, Any] = field(factory=dict, init=False, eq=False, repr=False)

    def scan(self) -> Scan:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows = pq.read_metadata(_for_arrow(self.path)).num_rows
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self.path, "Parquet", error) from error
        return Scan(_file_digest(self.path), rows)

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(_for_arrow(self.path)) as file:
                yield from _batch_rows(file.iter_batches(batch_size=_ROWS_PER_READ), str(self.path))
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self.path, "Parquet", error) from error

    def read_from(self, cursor: ShardCursor) -> Iterator[ShardRow]:
        """Yield the rows after a cursor; row groups before it are not read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(_for_arrow(self.path)) as file:
                starts = offsets_of([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])
                group = int(np.searchsorted(starts, cursor.row, side="right")) - 1
                if group >= file.num_row_groups:
                    return
                batches = file.iter_batches(batch_size=_ROWS_PER_READ, row_groups=list(range(group, file.num_row_groups)))
                first = int(starts[group])
                for number, (_, values) in enumerate(_batch_rows(_after(batches, cursor.row - first), ""), start=cursor.row):
                    yield ShardCursor(number), ShardCursor(number + 1), f"{self.path} row {number}", values
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(self.path, "Parquet", error) from error

    def at(self, index: int) -> tuple[str, Mapping[str, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        group = int(np.searchsorted(self._group_starts, index, side="right")) - 1
        if group not in self._group:
            self._group.clear()
            try:
                with pq.ParquetFile(_for_arrow(self.path)) as file:
                    self._group[group] = file.read_row_group(group)
            except (pa.ArrowException, OSError) as error:
                raise _unreadable(self.path, "Parquet", error) from error
        return f"{self.path} row {index}", _row_of(self._group[group], index - int(self._group_starts[group]))

    @cached_property
    def _group_starts(self) -> IntArray:
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(_for_arrow(self.path))
        return offsets_of([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])[:-1]


@frozen
class ArrowFile(FilePart):
    """An Arrow IPC file or stream (told apart by the file's first bytes), memory-mapped where it is on this machine."""

    path: DataFile

    def scan(self) -> Scan:
        return Scan(_file_digest(self.path), sum(batch.num_rows for batch in self._batches()))

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return _batch_rows(self._batches(), str(self.path))

    def read_from(self, cursor: ShardCursor) -> Iterator[ShardRow]:
        rows = _batch_rows(_after(self._batches(), cursor.row), "")
        for number, (_, values) in enumerate(rows, start=cursor.row):
            yield ShardCursor(number), ShardCursor(number + 1), f"{self.path} row {number}", values

    def at(self, index: int) -> tuple[str, Mapping[str, Any]]:
        return f"{self.path} row {index}", _row_of(self._table, index)

    @cached_property
    def _table(self) -> "pa.Table":
        import pyarrow as pa

        return pa.Table.from_batches(list(self._batches()))  # they keep the file mapped

    def _batches(self) -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        try:
            with pa.memory_map(str(self.path)) if isinstance(self.path, Path) else pa.PythonFile(self.path.open("rb")) as file:
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
class LoadedDataset(DatasetPart):
    """A split of a Hugging Face dataset. `digest` stands for its content, `folder` is where it was saved, if it was."""

    name: str
    dataset: Any
    digest: str
    folder: Path | None = None

    def scan(self) -> Scan:
        return Scan(self.digest, len(self.dataset))

    def read(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        tables = self.dataset.with_format("arrow").iter(batch_size=_ROWS_PER_READ)
        return _batch_rows((batch for table in tables for batch in table.to_batches()), self.name)

    def at(self, index: int) -> tuple[str, Mapping[str, Any]]:
        return f"{self.name} row {index}", _row_of(self.dataset.with_format("arrow")[index : index + 1], 0)


class _RepeatedKeyError(ValueError):
    """An object has a key twice, of which Python's reader keeps the last."""

    def at(self, where: str) -> DataError:
        return DataError(f"{where} has the key {self.args[0]!r} twice in one object", remedy="Remove or rename one of them")


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise _RepeatedKeyError(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return table


_JSON = json.JSONDecoder(object_pairs_hook=_object_of)


def parse_row(content: Content, where: str) -> Mapping[str, Any]:
    """Return the row's values; `where` is for errors. Raises DataError for JSON text that is no object."""
    if not isinstance(content, bytes):
        return content
    try:
        values = _JSON.decode(content.decode("utf-8-sig"))
    except _RepeatedKeyError as error:
        raise error.at(where) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}",
            remedy="Correct or remove that line",
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error.reason} at byte {error.start}", remedy="Save the file as UTF-8") from error
    return _check_object(values, where)


def _check_object(values: object, where: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise DataError(
            f"{where} holds a JSON {type(values).__name__} where an object with columns is needed",
            remedy="Store one object per sample",
        )
    return values


def _after(batches: "Iterator[pa.RecordBatch]", rows: int) -> "Iterator[pa.RecordBatch]":
    """Yield the batches without their first `rows` rows."""
    for batch in batches:
        if rows < batch.num_rows:
            yield batch.slice(rows)
        rows = max(0, rows - batch.num_rows)


def _batch_rows(batches: "Iterator[pa.RecordBatch]", name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    number = 0
    for whole in batches:
        for start in range(0, whole.num_rows, _ROWS_PER_READ):
            batch = whole.slice(start, _ROWS_PER_READ)
            columns = {column: _column_values(batch.column(index)) for index, column in enumerate(batch.schema.names)}
            for row in range(batch.num_rows):
                yield f"{name} row {number}", {column: values[row] for column, values in columns.items()}
                number += 1


def _row_of(table: "pa.Table", index: int) -> Mapping[str, Any]:
    _, values = next(_batch_rows(iter(table.slice(index, 1).combine_chunks().to_batches()), ""))
    return values


def _column_values(array: "pa.Array") -> Sequence[Any]:
    """Return one value per row: NumPy views for lists of numbers, Python objects for everything else."""
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
    return [without_nulls(value) for value in array.to_pylist()]


def without_nulls(value: Any) -> Any:
    """Return a value without keys that are null: Arrow gives every struct the keys of all rows, and the user did not write these."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value


def _for_arrow(path: DataFile) -> Any:
    """Return what pyarrow opens: the path, or an open file of a store."""
    return path if isinstance(path, Path) else path.open("rb")


def _file_digest(path: DataFile) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(cast("io.BufferedReader", file), "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, "data", error) from error


def _unreadable(path: DataFile, kind: str, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read as {kind}: {str(error).rstrip('.')}",
        remedy="Check that the file is complete and named after its format",
    )
