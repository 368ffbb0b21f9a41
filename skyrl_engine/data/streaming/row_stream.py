"""Rows of shards in a random order that a position tells exactly, with bounded memory.

```text
 shards, in an order dealt for the epoch ─► rows, in their order ─► buffer of `buffer_size` rows ─► the next row: one of these, at random
                                                                              ▲                          │
                                                                              └── its place: the next ◄──┘
```

The order is a pure function of (seed, epoch, buffer size, shards), pass after pass. A position holds the cursor in the present shard, and for
every row in the buffer where it stands: who goes on from it reads these rows again. When an epoch's shards are read, its buffer is emptied
before the next epoch begins, so that each row comes once an epoch.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from attrs import field, frozen

from skyrl_engine.contracts.values.ragged import AnyArray, IntArray
from skyrl_engine.data.sources.files import Content, DatasetPart, ShardCursor, ShardRow
from skyrl_engine.errors import DataError

_DEAL, _DRAW = 0x6465616C, 0x64726177  # keep these uses of the run's seed apart from its other uses

_EMPTY: Final = np.zeros((0, 3), dtype=np.int64)


@frozen(eq=False)
class StreamPlace:
    """A place between two rows of a stream: in epoch `epoch` (from 0), `drawn` rows were given, and the shards before number `dealt` of its
    order read, of that one the rows before `cursor`. `buffer` int64[n, 3] are the rows that were read and not given: shard, row, place.
    """

    epoch: int = 0
    drawn: int = 0
    dealt: int = 0
    cursor: ShardCursor = field(factory=ShardCursor)
    buffer: IntArray = field(default=_EMPTY)

    def document(self) -> dict[str, Any]:
        """Return the place as plain values."""
        return {
            "epoch": self.epoch,
            "drawn": self.drawn,
            "dealt": self.dealt,
            "row": self.cursor.row,
            "place": self.cursor.place,
            "buffer": self.buffer.tolist(),
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Read what `document` returned."""
        buffer = np.asarray(document["buffer"], dtype=np.int64).reshape(-1, 3)
        cursor = ShardCursor(document["row"], document["place"])
        return cls(document["epoch"], document["drawn"], document["dealt"], cursor, buffer)


@frozen
class DrawnRow:
    """A row of shard number `shard`: its place for messages, its content, and the folder of relative paths in it."""

    shard: int
    where: str
    content: Content
    folder: Path | None


@frozen(eq=False)
class RowStream:
    """The rows of `shards`, again and again, in an order that `entropy` decides; without `shuffle` in their own order."""

    name: str
    shards: Sequence[DatasetPart]
    entropy: tuple[int, ...]
    buffer_size: int
    shuffle: bool

    def open(self, place: StreamPlace) -> "OpenStream":
        """Open the stream at a place that it gave, or at its beginning, `StreamPlace()`. Raises DataError."""
        return OpenStream(self, place)

    def deal(self, epoch: int) -> list[int]:
        """Return the order of the shards in an epoch."""
        if not self.shuffle:
            return list(range(len(self.shards)))
        draws = self._generator(epoch, _DEAL).random_raw(len(self.shards))
        return [int(number) for number in np.argsort(draws, kind="stable")]

    def slots(self, epoch: int, drawn: int) -> np.random.PCG64:
        """Return what draws the slots of the buffer of an epoch, from row number `drawn` on: a raw number per row."""
        generator = self._generator(epoch, _DRAW)
        generator.advance(drawn)
        return generator

    def _generator(self, epoch: int, use: int) -> np.random.PCG64:
        return np.random.PCG64(np.random.SeedSequence([*self.entropy, epoch, use]))


class OpenStream:
    """A stream that is being read: `draw` gives the next row, `place` says where that was."""

    def __init__(self, stream: RowStream, place: StreamPlace) -> None:
        self.stream = stream
        self._size = stream.buffer_size if stream.shuffle else 1
        self._dealt, self._cursor = place.dealt, place.cursor
        self._where = np.zeros((max(self._size, len(place.buffer)), 3), dtype=np.int64)
        self._where[: len(place.buffer)] = place.buffer
        self._rows = _read_again(stream.shards, place.buffer)
        self._begin(place.epoch, place.drawn)

    @property
    def place(self) -> StreamPlace:
        return StreamPlace(self._epoch, self._drawn, self._dealt, self._cursor, self._where[: len(self._rows)].copy())

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def epochs(self) -> float:
        """Return how many passes were made, the present one by its shards."""
        return self._epoch + min(1.0, self._dealt / len(self._order))

    @property
    def waiting_rows(self) -> Sequence[DrawnRow]:
        """Return the rows in the buffer."""
        return self._rows

    def draw(self) -> DrawnRow:
        """Return the next row. Raises DataError where the shards hold none, and what reading them raises."""
        self._fill()
        if not self._rows and self._drawn:
            self._dealt, self._cursor = 0, ShardCursor()
            self._begin(self._epoch + 1, 0)
            self._fill()
        if not self._rows:
            raise DataError(f"the dataset {self.stream.name} has no rows", remedy="Give it at least one sample")
        slot = int(self._slots.random_raw()) % len(self._rows)
        drawn = self._rows[slot]
        self._drawn += 1
        if not self._read_into(slot):
            last = len(self._rows) - 1
            self._rows[slot], self._where[slot] = self._rows[last], self._where[last]
            self._rows.pop()
        return drawn

    def _begin(self, epoch: int, drawn: int) -> None:
        self._epoch, self._drawn = epoch, drawn
        self._order = self.stream.deal(epoch)
        self._slots = self.stream.slots(epoch, drawn)
        self._reading: Iterator[ShardRow] | None = None

    def _fill(self) -> None:
        while len(self._rows) < self._size and self._read_into(len(self._rows)):
            pass

    def _read_into(self, slot: int) -> bool:
        """Read the next row of the epoch into a slot; False where there is none."""
        while self._dealt < len(self._order):
            number = self._order[self._dealt]
            shard = self.stream.shards[number]
            if self._reading is None:
                self._reading = shard.read_from(self._cursor)
            found = next(self._reading, None)
            if found is None:
                self._reading, self._dealt, self._cursor = None, self._dealt + 1, ShardCursor()
                continue
            here, self._cursor, where, content = found
            self._where[slot] = number, here.row, here.place
            row = DrawnRow(number, where, _own(content), shard.folder)
            if slot == len(self._rows):
                self._rows.append(row)
            else:
                self._rows[slot] = row
            return True
        return False


def _read_again(shards: Sequence[DatasetPart], buffer: IntArray) -> list[DrawnRow]:
    """Read the rows of a buffer, int64[n, 3], each where it stands. Raises DataError for one that is not there any more."""
    rows: list[DrawnRow | None] = [None] * len(buffer)
    for number in np.unique(buffer[:, 0]).tolist():
        shard = shards[number]
        slots = {int(buffer[slot, 1]): slot for slot in np.flatnonzero(buffer[:, 0] == number).tolist()}
        first = slots[min(slots)]
        for here, _, where, content in shard.read_from(ShardCursor(int(buffer[first, 1]), int(buffer[first, 2]))):
            if (slot := slots.pop(here.row, None)) is not None:
                rows[slot] = DrawnRow(number, where, _own(content), shard.folder)
                if not slots:
                    break
        if slots:
            raise DataError(
                f"{shard.identity} has no row {min(slots)} any more, which it had when the checkpoint was written",
                remedy="Resume with the data that the run was started with",
            )
    return [row for row in rows if row is not None]


def _own(content: Content) -> Content:
    """Return the content in memory of its own: a row that waits would keep all of the batch that it was read with."""
    if isinstance(content, bytes):
        return content
    return {column: _copy(value) for column, value in content.items()}


def _copy(value: Any) -> Any:
    array: AnyArray | Any = value
    return array.copy() if isinstance(array, np.ndarray) else value


def count_bytes(content: Content) -> int:
    """Return about how many bytes a row takes in memory."""
    if isinstance(content, bytes):
        return len(content)
    return sum(len(column) + _count(value) for column, value in content.items())


def _count(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _count(inner) for key, inner in value.items())
    if isinstance(value, Sequence):
        return sum(map(_count, value))
    return 8
