"""Records of a journal as columns of numbers: what lists, choices and a resumed ledger need of a million attempts, in some bytes for each."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args, overload

from attrs import define, field, frozen

from skyrl_engine.contracts.values.rollout import Group, Status
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.arrow_codec import LearnedAttempt, decode_learned, group_of, tokens_of
from skyrl_engine.rollout.messages import RecordMessage, read_header, read_record
from skyrl_engine.rollout.record_bytes import failures

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

Event = Literal["group", "trained", "resumed"]
Read = TypeVar("Read")

_EVENTS: Final[tuple[Event, ...]] = get_args(Event)
_STATUSES: Final[tuple[Status, ...]] = get_args(Status)
_CODES: Final[Mapping[str, int]] = {status: code for code, status in enumerate(_STATUSES)}
_SUBJECTS: Final[Mapping[Event, str]] = {"group": "ticket", "trained": "step", "resumed": "version"}


@frozen
class Entry:
    """One record of a journal: a row of `Records`, which know what is below, and the bytes of its segment, which are read for all else.

    A group has a `ticket`, and its rows are read by `group`; a step that was trained has `step` and `tickets`, and what it learned is read by
    `read_learned`; a session that went on has the `version` of its checkpoint.
    """

    records: "Records"
    row: int

    @property
    def event(self) -> Event:
        return _EVENTS[self.records.events[self.row]]

    @property
    def segment(self) -> Path:
        return self.records.segment

    @property
    def offset(self) -> int:
        """Return the first byte of the record in its segment."""
        return self.records.offsets[self.row]

    @property
    def end(self) -> int:
        """Return the first byte after the record."""
        return self.records.ends[self.row]

    @property
    def ticket(self) -> int:
        return self.records.subjects[self.row]

    @property
    def step(self) -> int:
        return self.records.subjects[self.row]

    @property
    def version(self) -> int:
        return self.records.subjects[self.row]

    @property
    def tickets(self) -> tuple[int, ...]:
        """Return what a step trained on."""
        return self.records.tickets[self.row]

    @property
    def start_version(self) -> int:
        return self.records.start_versions[self.row]

    @property
    def newest_version(self) -> int:
        """Return the newest version of the weights that sampled a token of a group; 0 of another record."""
        return self.records.newest_versions[self.row]

    @property
    def dropped(self) -> str | None:
        """Return why a filter wanted to drop the group."""
        return self.records.dropped[self.row]

    @property
    def failed(self) -> bool:
        """Say if too few attempts of the group are left."""
        return bool(self.records.failed[self.row])

    @property
    def rewards(self) -> "array[float]":
        """Return the rewards of the group's attempts."""
        return self.records.rewards[slice(*self.records.bounds[self.row : self.row + 2])]

    @property
    def statuses(self) -> tuple[Status, ...]:
        """Return the statuses of the group's attempts."""
        return tuple(_STATUSES[code] for code in self.records.statuses[slice(*self.records.bounds[self.row : self.row + 2])])

    @property
    def header(self) -> Mapping[str, Any]:
        """Read all that the record says of itself. Raises RolloutError where it was damaged since."""
        return self._read(lambda content: self._same(read_header(content, 0)).header)

    def group(self) -> Group:
        """Read the group. Raises RolloutError where it was damaged since."""
        assert self.event == "group", f"{self.event} is no group"
        return self._read_rows(group_of)

    def read_tokens(self) -> "list[npt.NDArray[np.int32]]":
        """Read the tokens of every attempt of the group, and nothing else. Raises RolloutError where they were damaged since."""
        assert self.event == "group", f"{self.event} is no group"
        return self._read_rows(lambda batch, _: tokens_of(batch), ("token_ids",))

    def read_learned(self) -> list[LearnedAttempt]:
        """Read what a step learned, by tickets and members. Raises RolloutError where it was damaged since."""
        assert self.event == "trained", f"{self.event} is no step"
        return self._read_rows(decode_learned)

    def rows(self) -> "pa.RecordBatch":
        """Read the rows of any record, in the form of its format. Raises RolloutError where they were damaged since."""
        return self._read_rows(lambda batch, _: batch)

    def _read_rows(self, form: "Callable[[pa.RecordBatch, Mapping[str, Any]], Read]", columns: Sequence[str] = ()) -> Read:
        def read(content: bytes) -> Read:
            message, batch = read_record(content, 0, columns)
            return form(batch, self._same(message).header)

        return self._read(read)

    def _same(self, message: RecordMessage) -> RecordMessage:
        """Return a message that was read again. Raises ValueError for another record."""
        if message.checksum != self.records.checksums[self.row]:
            raise ValueError("another record")
        return message

    def _read(self, form: Callable[[bytes], Read]) -> Read:
        try:
            with self.segment.open("rb") as file:
                file.seek(self.offset)
                return form(file.read(self.end - self.offset))
        except failures() as error:
            subject = f"{'step' if self.event == 'trained' else self.event} {self.records.subjects[self.row]}"
            raise RolloutError(
                f"{subject} cannot be read from {self.segment} any more ({type(error).__name__})",
                remedy="Restore the file from a copy, or resume without it: what it held is then sampled again",
            ) from error


@define(eq=False)
class Records(Sequence[Entry]):
    """The records of a segment in their order: one row of every column for each."""

    segment: Path
    events: bytearray = field(factory=bytearray)
    """Places in the kinds of events."""
    offsets: "array[int]" = field(factory=lambda: array("q"))
    ends: "array[int]" = field(factory=lambda: array("q"))
    checksums: "array[int]" = field(factory=lambda: array("I"))
    subjects: "array[int]" = field(factory=lambda: array("q"))
    """The ticket of a group, the step that was trained, the version of a session's checkpoint."""
    start_versions: "array[int]" = field(factory=lambda: array("q"))
    newest_versions: "array[int]" = field(factory=lambda: array("q"))
    failed: bytearray = field(factory=bytearray)
    dropped: list[str | None] = field(factory=list)
    tickets: dict[int, tuple[int, ...]] = field(factory=dict)
    """Tickets that a step trained on, by row."""
    bounds: "array[int]" = field(factory=lambda: array("q", [0]))
    """Attempts of the record in `row` are those from `bounds[row]` to `bounds[row + 1]`."""
    rewards: "array[float]" = field(factory=lambda: array("d"))
    statuses: bytearray = field(factory=bytearray)
    _reasons: dict[str, str] = field(factory=dict, repr=False)

    def append(self, header: Mapping[str, Any], checksum: int, offset: int, end: int) -> None:
        """Take the next record. Raises one of `failures` for a header that says not what a record says, and is then as it was."""
        event: Event = header["event"]
        code, dropped, failed, versions = _EVENTS.index(event), None, False, (0, 0)
        rewards, statuses = array("d"), b""
        if event == "group":
            versions = int(header["start_version"]), int(header["newest_version"])
            dropped, failed = header["dropped"], bool(header.get("failed", False))
            rewards, statuses = array("d", header["rewards"]), bytes(map(_CODES.__getitem__, header["statuses"]))
            if len(rewards) != len(statuses):
                raise ValueError("its attempts differ in number")
        elif event == "trained":
            self.tickets[len(self)] = tuple(header["tickets"])
        # raises before the first column has changed
        subject, start, newest = array("q", (int(header[_SUBJECTS[event]]), *versions))
        self.subjects.append(subject)
        self.start_versions.append(start)
        self.newest_versions.append(newest)
        self.offsets.append(offset)
        self.ends.append(end)
        self.checksums.append(checksum)
        self.failed.append(failed)
        self.dropped.append(None if dropped is None else self._reasons.setdefault(dropped, dropped))
        self.rewards.extend(rewards)
        self.statuses.extend(statuses)
        self.bounds.append(len(self.rewards))
        # the number of records counts this one from here on
        self.events.append(code)

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, place: int) -> Entry: ...

    @overload
    def __getitem__(self, place: slice) -> list[Entry]: ...

    def __getitem__(self, place: int | slice) -> Entry | list[Entry]:
        if isinstance(place, slice):
            return [Entry(self, row) for row in range(len(self))[place]]
        return Entry(self, range(len(self))[place])


@define(eq=False)
class GroupEntries(Mapping[int, Entry]):
    """The last record of every ticket that counts, by ticket, in the order in which tickets were first recorded."""

    _records: list[Records] = field(factory=list)
    _places: dict[int, int] = field(factory=dict)
    """For every ticket the number of its `Records`, and its row in the lower 32 bits."""
    _of_version: "dict[int, array[int]]" = field(factory=dict)
    """Tickets by the newest version that sampled them, when they were recorded."""

    def put(self, records: Records, row: int) -> None:
        """Take the next record, which is of a group."""
        if not self._records or self._records[-1] is not records:
            self._records.append(records)
        ticket, version = records.subjects[row], records.newest_versions[row]
        self._places[ticket] = (len(self._records) - 1) << 32 | row
        if version not in self._of_version:
            self._of_version[version] = array("q")
        self._of_version[version].append(ticket)

    def drop_later(self, version: int) -> None:
        """Forget the groups that later weights than those of `version` sampled."""
        for later in [newest for newest in self._of_version if newest > version]:
            for ticket in self._of_version.pop(later):
                entry = self.get(ticket)
                # it may have been recorded again since
                if entry is not None and entry.newest_version > version:
                    del self._places[ticket]

    def clear(self) -> None:
        """Forget all groups."""
        self._places.clear()
        self._of_version.clear()

    def __getitem__(self, ticket: int) -> Entry:
        place = self._places[ticket]
        return Entry(self._records[place >> 32], place & 0xFFFFFFFF)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
