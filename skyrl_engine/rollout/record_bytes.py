"""Headers of records, proven from the bytes of their messages: the checksum over header and rows needs none of the arrays.

To make the arrays of a record takes several times as long as to prove it, and a journal is read for its headers far more often than for its
rows. Arrow verifies the tables of a message; the places of its buffers are then read from them (format/Message.fbs of Apache Arrow). A message
that is not laid out as the journal writes it is not judged here: Arrow makes its arrays, and `messages.header_of` judges those.
"""

import struct
import zlib
from collections.abc import Callable
from functools import cache, reduce
from operator import itemgetter, mul, or_
from typing import TYPE_CHECKING, Final

import numpy as np
from attrs import frozen

from skyrl_engine.rollout.arrow_codec import schema_of_format

if TYPE_CHECKING:
    import pyarrow as pa

HEADER: Final = b"rollouts"
CRC: Final = b"crc32"
"""Keys of a record's metadata: its header as JSON, and the checksum over header and rows."""

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

_VERSION: Final = 4
"""Number of Arrow's format V5 in a message."""

_UINT, _INT, _SHORT, _LONG = (struct.Struct(form).unpack_from for form in ("<I", "<i", "<H", "<q"))
_FIELDS: Final = struct.Struct("<7H").unpack_from
_PAIR: Final = struct.Struct("<4H").unpack_from
"""The beginning of what says where the fields of a table are: its size, the table's, and where five or two fields are, 0 for none."""

_FIVE_FIELDS: Final = 14
_TWO_FIELDS: Final = 8
"""Sizes, in bytes, of what says where five or two fields are."""

Pick = Callable[[tuple[int, ...]], tuple[int, ...]]


@frozen
class BatchLayout:
    """The nodes and the buffers of a record batch: which of them belong to what, by their places."""

    nodes: int
    buffers: int
    rows: Pick
    """Take, of the lengths of nodes, those of columns: all the number of rows."""
    absent: Pick
    """Take, of the lengths of buffers, those that say which values are missing; none are."""
    offsets: Pick
    """Take, of the lengths of buffers, those that say where the values of every row begin."""
    counts: Pick
    """Take, of the lengths of nodes, those of plain values: one for each of `values`."""
    values: Pick
    """Take, of the lengths of buffers, those of plain values."""
    widths: tuple[int, ...]
    """Bytes of each of them."""
    checked: tuple[int, ...]
    """The buffers that the checksum goes over, in its order, before the documents."""


def failures() -> tuple[type[BaseException], ...]:
    """Return what may be raised where bytes are not what was written."""
    import pyarrow as pa

    return pa.ArrowException, *_UNREADABLE


@cache
def layout_of(number: str) -> BatchLayout | None:
    """Return the layout of records in a format; None for format 2, whose checksum does not say where a document ends."""
    return None if number == "2" else _layout(schema_of_format(number))


def _layout(schema: "pa.Schema") -> BatchLayout:
    import pyarrow as pa

    nodes = buffers = 0
    rows: list[int] = []
    absent: list[int] = []
    offsets: list[int] = []
    counts: list[int] = []
    values: list[int] = []
    widths: list[int] = []
    checked: list[int] = []
    for field in schema:
        rows.append(nodes)
        absent.append(buffers)
        if pa.types.is_string(field.type):
            assert field.name == schema.names[-1], "documents are the last column"
            offsets.append(buffers + 1)
            nodes, buffers = nodes + 1, buffers + 3
            continue
        if pa.types.is_list(field.type):
            offsets.append(buffers + 1)
            absent.append(buffers + 2)
            checked += [buffers + 3, buffers + 1]
            nodes, buffers = nodes + 1, buffers + 2
            widths.append(field.type.value_type.bit_width // 8)
        else:
            checked.append(buffers + 1)
            widths.append(field.type.bit_width // 8)
        counts.append(nodes)
        values.append(buffers + 1)
        nodes, buffers = nodes + 1, buffers + 2
    picks: list[Pick] = [itemgetter(*places) for places in (rows, absent, offsets, counts, values)]
    return BatchLayout(nodes, buffers, picks[0], picks[1], picks[2], picks[3], picks[4], tuple(widths), tuple(checked))


def prove(message: bytes, layout: BatchLayout) -> tuple[bytes, int] | None:
    """Return the header, as JSON, and the checksum of the record in a message; None where it is to be judged by its arrays."""
    import pyarrow as pa

    try:
        if pa.ipc.read_message(message).type != "record batch":
            return None
        return _prove(message, layout)
    except failures():
        return None


def _prove(message: bytes, layout: BatchLayout) -> tuple[bytes, int] | None:
    # the tables were verified: all of their places lie in the message
    table = 8 + _UINT(message, 8)[0]
    size, _, version, _, batch, length, metadata = _FIELDS(message, table - _INT(message, table)[0])
    if size < _FIVE_FIELDS or not (version and batch and length and metadata):
        return None
    body = 8 + _INT(message, 4)[0]
    if _SHORT(message, table + version)[0] != _VERSION or body + _LONG(message, table + length)[0] != len(message):
        return None
    texts = _texts_of(message, _follow(message, table + metadata))
    table = _follow(message, table + batch)
    size, _, length, nodes, buffers, compression, variadic = _FIELDS(message, table - _INT(message, table)[0])
    # buffers are counted, and compressed ones marked, in fields that the journal never writes
    if size < _FIVE_FIELDS - 4 or (size >= _FIVE_FIELDS - 2 and compression) or (size >= _FIVE_FIELDS and variadic):
        return None
    rows = _LONG(message, table + length)[0] if length else 0
    if rows <= 0 or not nodes or not buffers or texts is None:
        return None
    text, written = texts
    crc = _checksum(
        message,
        rows,
        _pairs_of(message, _follow(message, table + nodes)),
        _pairs_of(message, _follow(message, table + buffers)),
        layout,
    )
    if crc is None:
        return None
    checksum = zlib.crc32(text, crc)
    return (text, checksum) if b"%08x" % checksum == written else None


def _checksum(message: bytes, rows: int, nodes: tuple[int, ...], buffers: tuple[int, ...], layout: BatchLayout) -> int | None:
    """Return the checksum over the rows of a record; None where its buffers are not as the journal lays them out."""
    body = memoryview(message)[8 + _INT(message, 4)[0] :]
    counts, places, sizes = nodes[::2], buffers[::2], buffers[1::2]
    if (
        len(counts) != layout.nodes
        or len(sizes) != layout.buffers
        or any(nodes[1::2])
        or any(layout.absent(sizes))
        or set(layout.rows(counts)) != {rows}
        or set(layout.offsets(sizes)) != {4 * rows + 4}
        or tuple(map(mul, layout.counts(counts), layout.widths)) != layout.values(sizes)
        or not _begin_aligned(places, len(body))
    ):
        return None
    crc = checked = 0
    for buffer in layout.checked:
        size = sizes[buffer]
        if size:
            part = body[places[buffer] : places[buffer] + size]
            crc, checked = zlib.crc32(part, crc), checked + len(part)
    bounds = np.frombuffer(body[places[-2] : places[-2] + sizes[-2]], "<i4")
    texts = body[places[-1] : places[-1] + sizes[-1]]
    # a buffer that does not lie in the message is shorter than it says
    if checked + bounds.nbytes + len(texts) != sum(sizes) or bounds[0] != 0 or bounds[-1] != sizes[-1]:
        return None
    return zlib.crc32(texts, zlib.crc32(np.subtract(bounds[1:], bounds[:-1], dtype=np.int64).data, crc))


def _begin_aligned(places: tuple[int, ...], room: int) -> bool:
    """Say if buffers begin in a body of `room` bytes, and all at multiples of 8."""
    bits = reduce(or_, places)
    return bits >= 0 and not bits & 7 and max(places) <= room


def _follow(message: bytes, place: int) -> int:
    """Return what the offset at a place leads to."""
    offset: int = _UINT(message, place)[0]
    return place + offset


def _pairs_of(message: bytes, vector: int) -> tuple[int, ...]:
    """Return the numbers of a vector of pairs, one after the other."""
    return struct.unpack_from(f"<{2 * _UINT(message, vector)[0]}q", message, vector + 4)


def _texts_of(message: bytes, vector: int) -> tuple[bytes, bytes] | None:
    """Return header and checksum of a vector of keys with values."""
    found = {}
    for entry in range(vector + 4, vector + 4 + 4 * _UINT(message, vector)[0], 4):
        table = _follow(message, entry)
        size, _, key, value = _PAIR(message, table - _INT(message, table)[0])
        if size < _TWO_FIELDS or not key or not value:
            return None
        key, value = _follow(message, table + key), _follow(message, table + value)
        found[message[key + 4 : key + 4 + _UINT(message, key)[0]]] = message[value + 4 : value + 4 + _UINT(message, value)[0]]
    return (found[HEADER], found[CRC]) if HEADER in found and CRC in found else None
