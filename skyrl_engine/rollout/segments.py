"""Segments of a journal: Arrow IPC streams whose head and records carry checksums, so that all that is whole is read where a part is damaged.

A stream is messages, one after the other: the schema, whose metadata are the segment's head, then a record batch per record. A message begins
with the marker FF FF FF FF and the length of its metadata, which say the length of the body that follows. After a damaged message, the next
one is found by its marker, and proven by its checksum and its number.
"""

import io
import json
import os
import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
from attrs import frozen

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.arrow_codec import formats, present_format, schema_of_format, schema_of_format_2
from skyrl_engine.rollout.messages import MARKER, is_cut_short, next_header, next_message, read_header, reason_at
from skyrl_engine.rollout.record_bytes import failures
from skyrl_engine.rollout.records import Records

if TYPE_CHECKING:
    import pyarrow as pa

_NAME: Final = re.compile(r"segment-(\d{8,})\.arrow")


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
    entries: Records
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
    """Read the headers of a segment's records, one record after the other.

    Raises RolloutError for a file that cannot be opened, and for another format.
    """
    try:
        with path.open("rb") as file:
            whole = _read_whole(path, file)
        content = b"" if whole is not None else path.read_bytes()
    except OSError as error:
        raise RolloutError(
            f"the segment {path} of the journal of rollouts cannot be read ({error.strerror or error})",
            remedy="Make it readable, or move it away: what it held is then sampled again",
        ) from error
    return _read_in_parts(path, content) if whole is None else whole


# --- a whole segment ---------------------------------------------------------------------------------------------------------------


def _read_whole(path: Path, file: io.BufferedReader) -> Segment | None:
    """Read a segment message by message; None where something is not as it was written."""
    import pyarrow as pa

    entries = Records(path)
    # what is written meanwhile is for another time
    size = os.fstat(file.fileno()).st_size
    try:
        schema = pa.ipc.open_stream(pa.BufferReader(next_message(file, size))).schema
        head, run = _head_of(schema)
        if run is None:
            return None
        number = schema.metadata[b"format"].decode()
        is_numbered = head is not None and head.was_damaged is None
        place = file.tell()
        while place < size:
            header, checksum, length = next_header(file, size - place, number)
            if is_numbered and header.get("record") != len(entries):
                return None
            entries.append(header, checksum, place, place + length)
            place += length
    except failures():
        return None
    return Segment(
        path,
        number_of(path) if head is None else head.number,
        run,
        head,
        size,
        entries,
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
    entries = Records(path)
    damages: list[Damage] = []
    first: int | None = None
    # from the head's own bytes on: its length may be what is damaged
    place, covered, last = 8, begin, -1
    # a format without numbers: what is inside of a record that was read is no record
    while (marker := MARKER.search(content, place)) is not None:
        at = marker.start()
        try:
            message = read_header(content, at)
            number = message.header.get("record", last + 1)
            if number > last:
                entries.append(message.header, message.checksum, at, message.end)
        except failures():
            place = at + 1
            continue
        if number <= last:
            place = at + 1
            continue
        if len(entries) == 1:
            first = message.header.get("record")
        if at > covered:
            lost = number - last - 1 if "record" in message.header else None
            damages.append(Damage(path, covered, at, reason_at(content, covered), lost=lost))
        elif number > last + 1 and (head is None or head.was_damaged is None):
            damages.append(Damage(path, at, at, f"{number - last - 1} records before byte {at:,} are lost"))
        covered, last = max(covered, message.end), number
        place = message.body_at if "record" in message.header else message.end
    if covered < len(content) or not content:
        torn = not damages and is_cut_short(content, covered)
        cause = "it is empty" if not content else "torn" if torn else reason_at(content, covered)
        damages.append(Damage(path, covered, len(content), cause, torn=torn))
    if begin == 0 and entries and entries[0].offset > 0 and first == 0:
        damages[0] = attrs.evolve(damages[0], lost=None, what="its head is damaged")
    if not damages:
        damages.append(Damage(path, covered, covered, "a length is damaged, and every record is there"))
    _refuse_other_format(path, content, entries)
    first_lost = not entries or (entries[0].offset > begin if first is None else first != 0)
    unsure = first_lost if head is None else head.unsure
    return Segment(
        path,
        number_of(path) if head is None else head.number,
        run,
        head,
        len(content),
        entries,
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


def _refuse_other_format(path: Path, content: bytes, entries: Records) -> None:
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
