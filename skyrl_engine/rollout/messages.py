"""Messages of an Arrow IPC stream, one by one: where each begins and ends, by its lengths, and if it is a record, by its checksum."""

import io
import json
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from skyrl_engine.rollout.arrow_codec import checksum_of, columns_of, formats, schema_of_format, schema_of_format_2
from skyrl_engine.rollout.record_bytes import CRC, HEADER, failures, layout_of, prove

if TYPE_CHECKING:
    import pyarrow as pa

MARKER: Final = re.compile(rb"\xff{4}(?!\xff)")
"""The beginning of a message. A length, which follows it, is a multiple of 8, so that of a row of bytes FF the last four count."""


def metadata_of(header: Mapping[str, Any], crc: int) -> dict[bytes, str]:
    """Return the metadata of a record, given the checksum of its rows."""
    text = json.dumps(header, allow_nan=False)
    return {HEADER: text, CRC: f"{zlib.crc32(text.encode(), crc):08x}"}


@frozen(eq=False)
class RecordMessage:
    """A record as it stands in its stream: its header, its checksum, where its body begins, and where it ends."""

    header: Mapping[str, Any]
    checksum: int
    body_at: int
    end: int


def _header_of(batch: "pa.RecordBatch", metadata: "pa.KeyValueMetadata | None") -> tuple[bytes, int]:
    """Return the header of a batch, as JSON, and its checksum. Raises ValueError where it is not what was written."""
    if metadata is None:
        raise ValueError("a record without a header")
    batch.validate(full=True)
    text, written = metadata[HEADER], metadata[CRC]
    checksum = zlib.crc32(text, 0 if batch.num_rows == 0 else checksum_of(columns_of(batch)))
    if f"{checksum:08x}" != written.decode():
        raise ValueError("a checksum differs")
    if batch.schema.equals(schema_of_format_2()):
        # its checksum does not say where one document ends
        for document in filter(None, batch.column("document").to_pylist()):
            json.loads(document)
    return text, checksum


def read_header(content: bytes, at: int) -> RecordMessage:
    """Read the header of the record at a byte of `content`, in any format that is read.

    Raises one of `failures` where it is none, or not what was written.
    """
    body_at, end = _whole_extent(content, at)
    text, checksum, _ = _read(content[at:end], formats(), None)
    return RecordMessage(json.loads(text), checksum, body_at, end)


def read_record(content: bytes, at: int, columns: Sequence[str] = ()) -> tuple[RecordMessage, "pa.RecordBatch"]:
    """Read the record at a byte of `content`, with some `columns` or all.

    Raises one of `failures` where it is none, or not what was written.
    """
    body_at, end = _whole_extent(content, at)
    text, checksum, batch = _read(content[at:end], formats(), columns)
    assert batch is not None
    return RecordMessage(json.loads(text), checksum, body_at, end), batch


def _whole_extent(content: bytes, at: int) -> tuple[int, int]:
    """Return the extent of a message that lies in `content`. Raises ValueError or struct.error for another one."""
    body_at, end = _extent(content, at)
    if not body_at <= end <= len(content):
        raise ValueError("its length is damaged")
    return body_at, end


def _read(message: bytes, numbers: Sequence[str], columns: Sequence[str] | None) -> tuple[bytes, int, "pa.RecordBatch | None"]:
    """Read the header, as JSON, and the checksum of a record; its rows if `columns` is not None: with these, or with all where it is empty."""
    errors = []
    for number in numbers:
        try:
            layout, batch = layout_of(number), None
            proven = None if layout is None else prove(message, layout)
            if proven is None:
                batch, metadata = _batch_of(message, number)
                proven = _header_of(batch, metadata)
            if columns is not None and (batch is None or columns):
                batch, _ = _batch_of(message, number, columns)
        except failures() as error:
            errors.append(error)
        else:
            return *proven, batch
    try:
        # what is wrong in the present format says more
        raise errors[0]
    finally:
        # an error holds this frame, and so the bytes of a segment for as long as the frame holds the error
        errors.clear()


def _batch_of(message: bytes, number: str, columns: Sequence[str] = ()) -> tuple["pa.RecordBatch", "pa.KeyValueMetadata | None"]:
    """Make the arrays of a record in a format: of some `columns`, or of all."""
    import pyarrow as pa

    head = _serialize_schema(number)
    reader = pa.ipc.open_stream(pa.BufferReader(head + message), options=_options_of(number, tuple(columns)))
    batch, metadata = reader.read_next_batch_with_custom_metadata()
    return batch, metadata


@cache
def _options_of(number: str, columns: tuple[str, ...]) -> "pa.ipc.IpcReadOptions | None":
    import pyarrow as pa

    schema = schema_of_format(number)
    return pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in columns]) if columns else None


def next_message(file: io.BufferedReader, room: int) -> bytes:
    """Read the message that begins where a file stands, of at most `room` bytes.

    Raises ValueError or struct.error where none begins there, or one that is longer.
    """
    begin = file.read(8)
    length = int.from_bytes(begin[4:], "little")
    if length > room - len(begin):
        raise ValueError("its length is damaged")
    begin += file.read(length)
    _, end = _extent(begin, 0)
    if end > room:
        raise ValueError("its length is damaged")
    # from its beginning on, so that a large one is not held twice
    file.seek(-len(begin), os.SEEK_CUR)
    message = file.read(end)
    if len(message) < end:
        raise ValueError("it is cut short")
    return message


def next_header(file: io.BufferedReader, room: int, number: str) -> tuple[Mapping[str, Any], int, int]:
    """Read the header of the record that begins where a file stands, its checksum, and how many bytes it has, of at most `room`.

    Raises one of `failures` where it is none of the format `number`, or not what was written.
    """
    message = next_message(file, room)
    text, checksum, _ = _read(message, (number,), None)
    return json.loads(text.decode()), checksum, len(message)


@cache
def _serialize_schema(number: str) -> bytes:
    """Return the message that begins a stream of a format. Cached by its number: old releases of pyarrow cannot hash a schema."""
    serialized: bytes = schema_of_format(number).serialize().to_pybytes()
    return serialized


def _extent(content: bytes, at: int) -> tuple[int, int]:
    """Return where the body of the message at a byte begins, and where the message ends, as its lengths say; beyond `content` where it does.

    Raises ValueError or struct.error for lengths that none has.
    """
    if content[at : at + 4] != b"\xff\xff\xff\xff":
        raise ValueError("no record begins here")
    (length,) = struct.unpack_from("<i", content, at + 4)
    body_at = at + 8 + length
    if length <= 0 or length % 8:
        raise ValueError("its length is damaged")
    if body_at > len(content):
        return body_at, body_at
    # bodyLength is the fourth field of the flatbuffer's table Message
    table = at + 8 + struct.unpack_from("<I", content, at + 8)[0]
    fields = table - struct.unpack_from("<i", content, table)[0]
    offset = struct.unpack_from("<H", content, fields + 10)[0] if struct.unpack_from("<H", content, fields)[0] > 10 else 0
    body = struct.unpack_from("<q", content, table + offset)[0] if offset else 0
    if body < 0:
        raise ValueError("its length is damaged")
    return body_at, body_at + body


def is_cut_short(content: bytes, at: int) -> bool:
    """Say if the bytes from this one on are the beginning of a message whose rest is missing."""
    rest = content[at : at + 8]
    if len(rest) < 8:
        return b"\xff\xff\xff\xff".startswith(rest[:4])
    try:
        return _extent(content, at)[1] > len(content)
    except (ValueError, struct.error):
        return False


def reason_at(content: bytes, at: int) -> str:
    """Say why the message that should begin at a byte cannot be read."""
    try:
        read_header(content, at)
    except failures() as error:
        # Arrow's own words are about buffers, and may be long
        return str(error) if type(error) is ValueError else "its metadata are damaged"
    return "out of its order"
