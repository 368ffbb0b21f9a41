"""Reading what offline runs wrote: files in LevelDB's log format with W&B's own messages in it, as its process writes them.

A file begins with ":W&B", a magic number and a version. Blocks of 32 KiB follow, of records with a header each: a checksum, the length, and a
type, which says that the record is whole, or the first, a middle or the last part of one (github.com/google/leveldb, doc/log_format.md).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, BEGINNING = 32_768, 7, 7
FULL, FIRST, LAST = 1, 2, 4


def read_history(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what was logged, a row for every call, of all offline runs in a folder, the oldest file first."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    for file in sorted(folder.glob("offline-run-*/run-*.wandb")):
        for message in _read_messages(file.read_bytes()):
            record = messages.Record.FromString(message)
            if record.HasField("history"):
                yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _read_messages(content: bytes) -> Iterator[bytes]:
    """Yield the whole messages of a file; one that was cut off at its end is none."""
    place, parts = BEGINNING, b""
    while place + HEADER <= len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        begin = place + HEADER
        place = begin + length
        if kind == 0 or place > len(content):
            return
        parts = content[begin:place] if kind in (FULL, FIRST) else parts + content[begin:place]
        if kind in (FULL, LAST):
            yield parts
