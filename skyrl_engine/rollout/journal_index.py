"""A journal of rollouts as it is read: its records in the order in which they were written, and those of them that count."""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from attrs import define, field, frozen

from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.ledger import Recorded
from skyrl_engine.rollout.records import Learned, checksum_of, columns_of, group_of, learned_of

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = "3"
_READ: Final = (FORMAT, "2")
"""Formats that are read; in 2 rewards are float32."""

HEADER: Final = b"rollouts"
CRC: Final = b"crc32"
"""Keys of a record's metadata: its header as JSON, and the checksum over header and rows."""

_SEGMENT: Final = re.compile(r"segment-(\d{8,})\.arrow")

Event = Literal["group", "trained", "resumed"]
Read = TypeVar("Read")


@frozen
class Entry:
    """One record of a journal.

    A group is read by `group`, where it lies; `header` says its ticket, environment, task key, start version, newest version and why it was
    dropped. A step that was trained has `step` and `tickets`, and what it learned is read by `learned`. A session that went on has the
    `version` of its checkpoint.
    """

    event: Event
    header: Mapping[str, Any]
    segment: Path
    offset: int

    @property
    def ticket(self) -> int:
        return int(self.header["ticket"])

    def group(self) -> Group:
        """Read the group. Raises RolloutError where it was damaged since."""
        assert self.event == "group", f"{self.event} is no group"
        return self._read(group_of)

    def learned(self) -> list[Learned]:
        """Read what a step learned, by tickets and members. Raises RolloutError where it was damaged since."""
        assert self.event == "trained", f"{self.event} is no step"
        return self._read(learned_of)

    def _read(self, form: "Callable[[pa.RecordBatch, Mapping[str, Any]], Read]") -> Read:
        import pyarrow as pa

        try:
            with self.segment.open("rb") as file:
                schema = pa.ipc.open_stream(file).schema
                file.seek(self.offset)
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
            batch.validate(full=True)
            return form(batch, self.header)
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            what = f"group {self.ticket}" if self.event == "group" else f"step {self.header['step']}"
            raise RolloutError(
                f"{what} cannot be read from {self.segment} any more ({type(error).__name__})",
                remedy="Restore the file from a copy, or resume without it: what it held is then sampled again",
            ) from error


@frozen
class Damage:
    """A place from which on a segment cannot be read: `offset` is where the last whole record ends, of `size` bytes."""

    segment: Path
    offset: int
    size: int
    what: str

    def __str__(self) -> str:
        return f"{self.segment.name}: {self.what}; {self.size - self.offset} bytes from {self.offset} on are not read"


@define
class JournalIndex:
    """The records of a journal that count: a session that goes on from a checkpoint leaves behind what later weights sampled or trained."""

    groups: dict[int, Entry] = field(factory=dict)
    """The last record of every ticket."""
    trained: dict[int, tuple[int, ...]] = field(factory=dict)
    """Tickets by the step that trained on them."""
    learned: dict[int, Entry] = field(factory=dict)
    """The records of steps, which hold what they learned."""
    damages: list[Damage] = field(factory=list)
    ends: dict[Path, int] = field(factory=dict)
    """The last step that was trained when a segment ended, by segment."""

    def add(self, entry: Entry) -> None:
        """Take the next record."""
        if entry.event == "group":
            self.groups[entry.ticket] = entry
        elif entry.event == "trained":
            step = int(entry.header["step"])
            self.trained[step], self.learned[step] = tuple(entry.header["tickets"]), entry
        else:
            version = int(entry.header["version"])
            self.groups = {ticket: each for ticket, each in self.groups.items() if each.header["newest_version"] <= version}
            self.trained = {step: tickets for step, tickets in self.trained.items() if step <= version}
            self.learned = {step: each for step, each in self.learned.items() if step <= version}

    def steps(self) -> dict[int, int]:
        """Return the step that trained on a ticket, by ticket."""
        return {ticket: step for step, tickets in self.trained.items() for ticket in tickets}

    def recorded(self) -> dict[int, Recorded]:
        """Return what a ledger that goes on asks of every ticket's record."""
        return {
            ticket: Recorded(
                int(entry.header["start_version"]),
                int(entry.header["newest_version"]),
                entry.header["dropped"],
                failed=bool(entry.header.get("failed", False)),
            )
            for ticket, entry in self.groups.items()
        }


def read_index(folder: Path) -> JournalIndex:
    """Read the headers of a journal, in the order in which they were written; a folder that is not there holds none.

    A segment that is missing, or lost its beginning, may have said that a session went on from a checkpoint: groups before it do not count,
    since later weights than the checkpoint's may have sampled them.
    """
    index = JournalIndex()
    segments = segments_of(folder)
    for place, segment in enumerate(segments):
        if place and number_of(segment) != number_of(segments[place - 1]) + 1:
            index.groups = {}
        entries = 0
        for found in _read_segment(segment):
            if isinstance(found, Damage):
                index.damages.append(found)
                if entries == 0 and segment != segments[-1]:
                    index.groups = {}
            else:
                index.add(found)
                entries += 1
        index.ends[segment] = max(index.trained, default=0)
    return index


def read_groups(folder: Path) -> Iterator[Group]:
    """Read the groups of a journal that count, by ticket. One that was trained on is not dropped, whatever a filter said."""
    index = read_index(folder)
    steps = index.steps()
    for ticket in sorted(index.groups):
        yield settled(index.groups[ticket].group(), trained=ticket in steps)


def settled(group: Group, *, trained: bool) -> Group:
    """Return a group as the ledger decided, where its record says what a filter wanted."""
    if not trained or group.dropped is None:
        return group
    return Group(group.ticket, group.environment, group.task_key, group.start_version, group.trajectories)


def run_of(segment: Path) -> str | None:
    """Return the identity of the run that wrote a segment; None where its beginning was lost."""
    import pyarrow as pa

    try:
        with segment.open("rb") as file:
            metadata = pa.ipc.open_stream(file).schema.metadata or {}
    except (pa.ArrowException, OSError):
        return None
    text = metadata.get(b"run")
    return None if text is None else text.decode()


def number_of(segment: Path) -> int:
    """Return the number of a segment, by its name."""
    return int(segment.stem.removeprefix("segment-"))


def segments_of(folder: Path) -> list[Path]:
    """List the segments of a journal, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(each for each in folder.iterdir() if _SEGMENT.fullmatch(each.name))


def _read_segment(segment: Path) -> Iterator[Entry | Damage]:
    """Yield the records of a segment up to its end, or up to the first that is torn or damaged."""
    import pyarrow as pa

    size = segment.stat().st_size
    good = 0
    if size == 0:
        return
    try:
        with segment.open("rb") as file:
            reader = pa.ipc.open_stream(file)
            _refuse_other_format(segment, reader.schema)
            good = file.tell()
            while good < size:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
                header = _verified(batch, metadata)
                yield Entry(header["event"], header, segment, good)
                good = file.tell()
    except StopIteration:
        yield Damage(segment, good, size, "torn")
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, EOFError) as error:
        yield Damage(segment, good, size, f"torn or damaged ({str(error).splitlines()[0] if str(error) else type(error).__name__})")


def _verified(batch: "pa.RecordBatch", metadata: "pa.KeyValueMetadata | None") -> dict[str, Any]:
    """Return the header of a batch. Raises ValueError where it is not what was written."""
    if metadata is None:
        raise ValueError("a record without a header")
    batch.validate(full=True)
    text, written = metadata[HEADER], metadata[CRC]
    crc = 0 if batch.num_rows == 0 else checksum_of(columns_of(batch))
    if f"{zlib.crc32(text, crc):08x}" != written.decode():
        raise ValueError("a checksum differs")
    header: dict[str, Any] = json.loads(text)
    return header


def _refuse_other_format(segment: Path, schema: "pa.Schema") -> None:
    found = (schema.metadata or {}).get(b"format", b"?").decode()
    if found not in _READ:
        raise RolloutError(
            f"{segment} is no journal of rollouts of format {' or '.join(reversed(_READ))} ({found})",
            remedy="Use the engine version that wrote it",
        )
