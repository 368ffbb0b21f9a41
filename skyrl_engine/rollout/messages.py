"""Messages of an Arrow IPC stream, one by one: where each begins and ends, by its lengths, and if it is a record, by its checksum."""

import json
import re
import struct
import zlib
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from skyrl_engine.rollout.arrow_codec import checksum_of, columns_of, formats, schema_of_format, schema_of_format_2

if TYPE_CHECKING:
    import pyarrow as pa

HEADER: Final = b"rollouts"
CRC: Final = b"crc32"
"""Keys of a record's metadata: its header as JSON, and the checksum over header and rows."""

MARKER: Final = re.compile(rb"\xff{4}(?!\xff)")
"""The beginning of a message. A length, which follows it, is a multiple of 8, so that of a row of bytes FF the last four count."""

_UNREADABLE: Final = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    StopIteration,
    OverflowError,
    MemoryError,
    struct.error,
)


def metadata_of(header: Mapping[str, Any], crc: int) -> dict[bytes, str]:
    """Return the metadata of a record, given the checksum of its rows."""
    text = json.dumps(header, allow_nan=False)
    return {HEADER: text, CRC: f"{zlib.crc32(text.encode(), crc):08x}"}


def header_of(batch: "pa.RecordBatch", metadata: "pa.KeyValueMetadata | None") -> dict[str, Any]:
    """Return the header of a batch. Raises ValueError where it is not what was written."""
    if metadata is None:
        raise ValueError("a record without a header")
    batch.validate(full=True)
    text, written = metadata[HEADER], metadata[CRC]
    crc = 0 if batch.num_rows == 0 else checksum_of(columns_of(batch))
    if f"{zlib.crc32(text, crc):08x}" != written.decode():
        raise ValueError("a checksum differs")
    if batch.schema.equals(schema_of_format_2()):
        # its checksum does not say where one document ends
        for document in filter(None, batch.column("document").to_pylist()):
            json.loads(document)
    header: dict[str, Any] = json.loads(text)
    return header


def failures() -> tuple[type[BaseException], ...]:
    import pyarrow as pa

    return pa.ArrowException, *_UNREADABLE


def read_message(content: bytes, at: int) -> tuple["pa.RecordBatch", dict[str, Any], tuple[int, int]]:
    """Return the batch and the header of the message at a byte of `content`, where its body begins, and where it ends.

    Raises one of `failures` where it is none, or not what was written.
    """
    import pyarrow as pa

    body_at, end = _extent(content, at)
    if not body_at <= end <= len(content):
        raise ValueError("its length is damaged")
    message = content[at:end]
    errors = []
    for head in _schema_messages():
        try:
            reader = pa.ipc.open_stream(pa.BufferReader(head + message))
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            return batch, header_of(batch, metadata), (body_at, end)
        except failures() as error:
            errors.append(error)
    # what is wrong in the present format says more
    raise errors[0]


def _schema_messages() -> tuple[bytes, ...]:
    return tuple(_serialize_schema(schema_of_format(number)) for number in formats())


@cache
def _serialize_schema(schema: "pa.Schema") -> bytes:
    serialized: bytes = schema.serialize().to_pybytes()
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
        read_message(content, at)
    except failures() as error:
        # Arrow's own words are about buffers, and may be long
        return str(error) if type(error) is ValueError else "its metadata are damaged"
    return "out of its order"
