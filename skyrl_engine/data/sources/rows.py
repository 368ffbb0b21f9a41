"""Rows of a dataset, with the file and line that each came from."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from skyrl_engine.contracts.values.ragged import IntArray, offsets_of
from skyrl_engine.data.sources.files import Content, DatasetPart, Scan, parse_row
from skyrl_engine.errors import ColumnError, DataError
from skyrl_engine.near_words import find_near_word

BoolArray = npt.NDArray[np.bool_]


class WatchedColumns(Mapping[str, Any]):
    """A row's values by column, which know the columns that somebody has asked for: those are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: set[str] = set()

    def __getitem__(self, column: str) -> Any:
        self.read.add(column)
        return self._values[column]

    def __contains__(self, column: object) -> bool:
        return column in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unread(self, known: AbstractSet[str]) -> set[str]:
        """Return the columns of `known` that hold something here and that nobody has asked for."""
        return {
            column for column in self._values if column in known and column not in self.read and _is_filled(self._values[column])
        }


def _is_filled(value: Any) -> bool:
    return value is not None and not (isinstance(value, str | bytes | list | tuple | dict | np.ndarray) and len(value) == 0)


@frozen
class Row:
    """`number` counts from 0 over the whole source; `where` names file and line or row, for messages. Lists of numbers are NumPy arrays.

    Relative paths in the values start from `folder`; None where the source has none.
    """

    number: int
    where: str
    values: Mapping[str, Any]
    folder: Path | None = None

    @property
    def name(self) -> str:
        return f"sample {self.number} ({self.where})"

    def wrong(self, column: str, what: str, remedy: str) -> DataError:
        """Return the error for a value of this row."""
        return DataError(f"{self.name}, column {column!r}: {what}", remedy=remedy)


def kind_of(value: object) -> str:
    """Return the kind of a value, for an error."""
    return "nothing" if value is None else type(value).__name__


def join_names(names: Iterable[str]) -> str:
    """Return names of columns as text, for an error."""
    return ", ".join(map(repr, names)) or "none"


@frozen(eq=False)
class Source:
    """A dataset split: its parts in order. `name` is what the user called it.

    `names` maps names of columns that the engine knows to those that the dataset has for them; rows have the engine's. `names_key` is
    the table of the configuration that says so. `datasets` are the names of several datasets in one source and how many parts each has, in
    the order of the parts; none where it is one dataset.
    """

    name: str
    parts: Sequence[DatasetPart]
    names: Mapping[str, str] = MappingProxyType({})
    names_key: str = "data.map"
    datasets: Sequence[tuple[str, int]] = ()
    _scans: list[Scan] = field(factory=list, init=False)

    def scan(self) -> Sequence[Scan]:
        """Scan every part, once."""
        if not self._scans:
            self._scans.extend(part.scan() for part in self.parts)
        return self._scans

    def __len__(self) -> int:
        return sum(scan.rows for scan in self.scan())

    @property
    def digest(self) -> str:
        """Return sha256 over the content of all parts in order."""
        return hashlib.sha256("\n".join(scan.digest for scan in self.scan()).encode()).hexdigest()

    def rows(self, wanted: BoolArray | None = None, on_bad: Callable[[int, DataError], None] | None = None) -> Iterator[Row]:
        """Yield the rows marked in `wanted` bool[rows] (None: all) in order; others are not parsed. A row that cannot be parsed is given to
        `on_bad`, by its number, and skipped; without it that raises DataError naming file and line.
        """
        end = None if wanted is None else int(np.max(np.flatnonzero(wanted), initial=-1)) + 1
        number = 0
        for part in self.parts:
            for where, content in part.read():
                if end is not None and number >= end:
                    return
                if wanted is None or wanted[number]:
                    try:
                        row = self.make_row(number, where, content, part.folder)
                    except DataError as error:
                        if on_bad is None:
                            raise
                        on_bad(number, error)
                    else:
                        yield row
                number += 1

    def folders(self, rows: npt.ArrayLike) -> list[Path | None]:
        """Return, for each of these row numbers, the folder that the row's relative paths start from."""
        return [self.parts[part].folder for part in self.parts_of(rows).tolist()]

    def parts_of(self, rows: npt.ArrayLike) -> IntArray:
        """Return int64[rows]: the part that holds each of these row numbers."""
        starts = offsets_of([scan.rows for scan in self.scan()])
        return np.asarray(np.searchsorted(starts, rows, side="right") - 1, dtype=np.int64)

    def datasets_of(self, rows: npt.ArrayLike) -> IntArray:
        """Return int64[rows]: the number among `datasets` of the one that holds each of these row numbers."""
        numbers = np.repeat(np.arange(len(self.datasets), dtype=np.int64), [parts for _, parts in self.datasets])
        return np.asarray(numbers[self.parts_of(rows)], dtype=np.int64)

    def row(self, number: int) -> Row:
        """Read row `number` alone. Raises DataError where its file's format does not allow that."""
        part = int(self.parts_of(number))
        where, content = self.parts[part].at(number - sum(scan.rows for scan in self.scan()[:part]))
        return self.make_row(number, where, content, self.parts[part].folder)

    def make_row(self, number: int, where: str, content: Content, folder: Path | None) -> Row:
        """Parse a row of the dataset; it has the engine's names of columns. Raises DataError naming file and line."""
        row = Row(number, where, parse_row(content, where), folder)
        if not self.names:
            return row
        for ours, theirs in self.names.items():
            if theirs not in row.values:
                near = find_near_word(theirs, row.values)
                key = f"{self.names_key}.{ours}"
                raise ColumnError(
                    f"{row.name} has no column {theirs!r}, which {key} names; it has {join_names(row.values)}",
                    remedy=f"Write {key}={near}" if near else f"Name one of its columns: {key}=NAME",
                    key=self.names_key,
                )
        unnamed = {column: value for column, value in row.values.items() if column not in self.names.values()}
        return evolve(row, values={**unnamed, **{ours: row.values[theirs] for ours, theirs in self.names.items()}})
