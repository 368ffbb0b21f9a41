"""Segments of a journal: Arrow IPC streams whose head and records carry checksums, so that all that is whole is read where a part is damaged.

A stream is messages, one after the other: the schema, whose metadata are the segment's head, then a record batch per record. A message begins
with the marker FF FF FF FF and the length of its metadata, which say the length of the body that follows. After a damaged message, the next
one is found by its marker, and proven by its checksum and its number.
"""

import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import attrs
from attrs import frozen

from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.arrow_codec import (
    LearnedAttempt,
    decode_learned,
    formats,
    group_of,
    present_format,
    schema_of_format,
    schema_of_format_2,
)
from skyrl_engine.rollout.messages import MARKER, failures, header_of, is_cut_short, read_message, reason_at

if TYPE_CHECKING:
    import pyarrow as pa

_NAME: Final = re.compile(r"segment-(\d{8,})\.arrow")

Event = Literal["group", "trained", "resumed"]
Read = TypeVar("Read")


@frozen
class Head:
    """The beginning of a segment of the run `run`: its number, and the number of the oldest segment that had not expired when it began.

    `resumed` is the version of the checkpoint that its session went on from, in that session's first segment. Where it was written in the place
    of a damaged file, `was_damaged` says what was lost and `unsure` that a mark of a session that went on may be among that.
    """

    run: str
    number: int
    oldest: int
    resumed: int | None = None
    was_damaged: str | None = None
    unsure: bool = False

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what the schema of the segment says."""
        text = json.dumps(attrs.asdict(self))
        number = present_format()
        return ("run", self.run), ("format", number), ("segment", text), ("crc32", _head_checksum(text.encode(), number.encode()))


@frozen
class Entry:
    """One record of a journal, at the bytes from `offset` to `end` of its segment.

    A group is read by `group`, where it is; `header` says its ticket, environment, task key, start version, newest version and why it was
    dropped. A step that was trained has `step` and `tickets`, and what it learned is read by `learned`. A session that went on has the
    `version` of its checkpoint.
    """

    event: Event
    header: Mapping[str, Any]
    segment: Path
    offset: int = 0
    end: int = 0

    @property
    def ticket(self) -> int:
        return int(self.header["ticket"])

    def group(self) -> Group:
        """Read the group. Raises RolloutError where it was damaged since."""
        assert self.event == "group", f"{self.event} is no group"
        return self._read(group_of)

    def read_learned(self) -> list[LearnedAttempt]:
        """Read what a step learned, by tickets and members. Raises RolloutError where it was damaged since."""
        assert self.event == "trained", f"{self.event} is no step"
        return self._read(decode_learned)

    def rows(self) -> "pa.RecordBatch":
        """Read the rows of any record, in the form of its format. Raises RolloutError where they were damaged since."""
        return self._read(lambda batch, _: batch)

    def _batch(self) -> "pa.RecordBatch":
        with self.segment.open("rb") as file:
            file.seek(self.offset)
            batch, header, _ = read_message(file.read(self.end - self.offset), 0)
        if header != self.header:
            raise ValueError("another record")
        return batch

    def _read(self, form: "Callable[[pa.RecordBatch, Mapping[str, Any]], Read]") -> Read:
        try:
            return form(self._batch(), self.header)
        except failures() as error:
            of_event = {"group": "ticket", "trained": "step", "resumed": "version"}[self.event]
            subject = f"{'step' if self.event == 'trained' else self.event} {self.header[of_event]}"
            raise RolloutError(
                f"{subject} cannot be read from {self.segment} any more ({type(error).__name__})",
                remedy="Restore the file from a copy, or resume without it: what it held is then sampled again",
            ) from error


@frozen
class Damage:
    """A part of a segment that cannot be read, from byte `offset` to `end`. A `torn` one is the half of a record that a crash left at the end.

    `lost` counts the records that it held, where that is known.
    """

    segment: Path
    offset: int
    end: int
    what: str
    torn: bool = False
    lost: int | None = None

    @property
    def description(self) -> str:
        """Say what is damaged, without the file's name."""
        if self.offset == self.end:
            return self.what
        records = "" if self.lost is None else f", {self.lost} record{'s' * (self.lost != 1)} lost"
        return f"bytes {self.offset:,} to {self.end:,} cannot be read: {self.what}{records}"

    def __str__(self) -> str:
        return f"{self.segment.name}: {self.description}"


@frozen(eq=False)
class Segment:
    """A segment as it was read: what of it is whole, and what is damaged. `head` is None where its beginning is damaged.

    `number` is what the head says, else the file's name; `run` is None where nothing says it. `unsure` says that a mark of a session that went
    on may be lost.
    """

    path: Path
    number: int
    run: str | None
    head: Head | None
    size: int
    entries: tuple[Entry, ...]
    damages: tuple[Damage, ...]
    unsure: bool

    @property
    def is_torn(self) -> bool:
        """Say if nothing but a half-written record at its end is damaged."""
        return len(self.damages) == 1 and self.damages[0].torn

    @property
    def whole_bytes(self) -> int:
        """Count the bytes before the first damage."""
        return min((damage.offset for damage in self.damages), default=self.size)


def segments_of(folder: Path) -> list[Path]:
    """List the files of a journal, by their names."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def number_of(segment: Path) -> int:
    """Return the number of a segment, by its name."""
    return int(segment.stem.removeprefix("segment-"))


def path_of(folder: Path, number: int) -> Path:
    """Return the place of a segment."""
    return folder / f"segment-{number:08d}.arrow"


def read_segment(path: Path) -> Segment:
    """Read the headers of a segment's records. Raises RolloutError for a file that cannot be opened, and for another format."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RolloutError(
            f"the segment {path} of the journal of rollouts cannot be read ({error.strerror or error})",
            remedy="Make it readable, or move it away: what it held is then sampled again",
        ) from error
    whole = _read_whole(path, content)
    return _read_in_parts(path, content) if whole is None else whole


# --- a whole segment ---------------------------------------------------------------------------------------------------------------


def _read_whole(path: Path, content: bytes) -> Segment | None:
    """Read a segment message by message; None where something is not as it was written."""
    import pyarrow as pa

    entries: list[Entry] = []
    try:
        # out of memory: from a file, Arrow allocates what a damaged length says
        file = pa.BufferReader(content)
        reader = pa.ipc.open_stream(file)
        head, run = _head_of(reader.schema)
        if run is None:
            return None
        place = file.tell()
        while place < len(content):
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            header = header_of(batch, metadata)
            entries.append(Entry(header["event"], header, path, place, file.tell()))
            place = file.tell()
    except failures():
        return None
    numbers = [entry.header.get("record") for entry in entries]
    if head is not None and head.was_damaged is None and numbers != list(range(len(entries))):
        return None
    return Segment(
        path,
        number_of(path) if head is None else head.number,
        run,
        head,
        len(content),
        tuple(entries),
        (),
        unsure=head is not None and head.unsure,
    )


def _head_of(schema_: "pa.Schema") -> tuple[Head | None, str | None]:
    """Return the head of a segment and its run: the run alone of format 2, whose records have no number, neither where it is damaged."""
    metadata = schema_.metadata or {}
    run, plain = metadata.get(b"run"), schema_.remove_metadata()
    if metadata.get(b"format") == b"2" and run is not None and plain.equals(schema_of_format_2()) and b"segment" not in metadata:
        return None, run.decode()
    text = metadata.get(b"segment", b"")
    right = metadata.get(b"crc32", b"").decode() == _head_checksum(text, metadata.get(b"format", b""))
    number = metadata.get(b"format", b"").decode(errors="replace")
    if number == "2" or number not in formats() or not text or not right or not plain.equals(schema_of_format(number)):
        return None, None
    head = Head(**json.loads(text))
    if run is None or run.decode() != head.run:
        return None, None
    return head, head.run


def _head_checksum(text: bytes, format_: bytes) -> str:
    return f"{zlib.crc32(text, zlib.crc32(format_)):08x}"


# --- a damaged segment -------------------------------------------------------------------------------------------------------------


def _read_in_parts(path: Path, content: bytes) -> Segment:
    """Read what is whole of a segment, wherever it is. Raises RolloutError for one of another format."""
    head, run, begin = _head_at(content)
    entries: list[Entry] = []
    damages: list[Damage] = []
    # from the head's own bytes on: its length may be what is damaged
    place, covered, last = 8, begin, -1
    # a format without numbers: what is inside of a record that was read is no record
    while (marker := MARKER.search(content, place)) is not None:
        at = marker.start()
        try:
            _, header, (body_at, end) = read_message(content, at)
        except failures():
            place = at + 1
            continue
        number = header.get("record", last + 1)
        if number <= last:
            place = at + 1
            continue
        if at > covered:
            lost = number - last - 1 if "record" in header else None
            damages.append(Damage(path, covered, at, reason_at(content, covered), lost=lost))
        elif number > last + 1 and (head is None or head.was_damaged is None):
            damages.append(Damage(path, at, at, f"{number - last - 1} records before byte {at:,} are lost"))
        entries.append(Entry(header["event"], header, path, at, end))
        covered, last = max(covered, end), number
        place = body_at if "record" in header else end
    if covered < len(content) or not content:
        torn = not damages and is_cut_short(content, covered)
        cause = "it is empty" if not content else "torn" if torn else reason_at(content, covered)
        damages.append(Damage(path, covered, len(content), cause, torn=torn))
    if begin == 0 and entries and entries[0].offset > 0 and entries[0].header.get("record") == 0:
        damages[0] = attrs.evolve(damages[0], lost=None, what="its head is damaged")
    if not damages:
        damages.append(Damage(path, covered, covered, "a length is damaged, and every record is there"))
    _refuse_other_format(path, content, entries)
    first_lost = not entries or (entries[0].header["record"] != 0 if "record" in entries[0].header else entries[0].offset > begin)
    unsure = first_lost if head is None else head.unsure
    return Segment(
        path,
        number_of(path) if head is None else head.number,
        run,
        head,
        len(content),
        tuple(entries),
        tuple(damages),
        unsure,
    )


def _head_at(content: bytes) -> tuple[Head | None, str | None, int]:
    """Return the head, the run, and where the head ends: 0 where it is damaged."""
    import pyarrow as pa

    try:
        end = 8 + int.from_bytes(content[4:8], "little")
        head, run = _head_of(pa.ipc.open_stream(pa.BufferReader(content[:end])).schema)
    except failures():
        return None, None, 0
    return (head, run, end) if run is not None else (None, None, 0)


def _refuse_other_format(path: Path, content: bytes, entries: list[Entry]) -> None:
    """Refuse a file that says that it is of a format that is not read, and of which nothing can be read."""
    import pyarrow as pa

    try:
        metadata = pa.ipc.open_stream(pa.BufferReader(content)).schema.metadata or {}
    except failures():
        return
    format_number, text = metadata.get(b"format", b"?"), metadata.get(b"segment", b"")
    intact = not text or metadata.get(b"crc32", b"").decode(errors="replace") == _head_checksum(text, format_number)
    # a head that is as it was written has the word; of one that may be damaged, records that can be read
    if format_number.decode(errors="replace") not in formats() and ((text and intact) or not (entries or text)):
        raise RolloutError(
            f"{path} is no journal of rollouts of format 2 to {present_format()} ({format_number.decode(errors='replace')})",
            remedy="Use the engine version that wrote it",
        )
