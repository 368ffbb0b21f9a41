"""Damaged segments of a journal, kept aside as they are; what could be read of one takes its place."""

import io
import logging
import os
import shutil
from pathlib import Path

from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.arrow_codec import convert_to_present_format, schema
from skyrl_engine.rollout.journal_index import JournalIndex
from skyrl_engine.rollout.messages import metadata_of
from skyrl_engine.rollout.segments import Head, Segment
from skyrl_engine.run.durable import sync, write_durably

DAMAGED = "damaged"
"""The folder, in that of the journal, of files as they were found."""

logger = logging.getLogger(__name__)


def repair(folder: Path, index: JournalIndex, run: str) -> bool:
    """Cut what a crash left half-written, and put damaged segments and copies aside. Returns True where a file changed.

    Raises RolloutError where files cannot be written.
    """
    changed = False
    try:
        for copy in index.copies:
            logger.warning("%s is kept as %s", copy, _keep_aside(copy))
            copy.unlink()
            changed = True
        for segment in index.segments:
            damage = index.torn
            if damage is not None and damage.segment == segment.path:
                logger.warning("%s; what a crash left half-written is cut", damage)
                _cut(segment.path, damage.offset)
                changed = True
            elif segment.damages:
                _replace_damaged(segment, index.oldest, run)
                changed = True
        if changed:
            sync(folder)
    except OSError as error:
        raise RolloutError(
            f"damaged segments of the journal of rollouts {folder} cannot be put aside ({error.strerror or error})",
            remedy="Free space there or make it writable, then resume the run with checkpoint.resume = true",
        ) from error
    return changed


def _cut(path: Path, size: int) -> None:
    if size == 0:
        path.unlink()
    else:
        os.truncate(path, size)
        sync(path)


def _replace_damaged(segment: Segment, oldest: int, run: str) -> None:
    """Keep a damaged segment aside, and write what could be read of it in its place."""
    import pyarrow as pa

    copy = _keep_aside(segment.path)
    damages = "; ".join(damage.description for damage in segment.damages)
    before = "" if segment.head is None or segment.head.was_damaged is None else f"{segment.head.was_damaged}; then "
    head = Head(
        segment.run or run,
        segment.number,
        oldest if segment.head is None else segment.head.oldest,
        None if segment.head is None else segment.head.resumed,
        f"{before}{damages} (kept as {copy.relative_to(segment.path.parent)})",
        segment.unsure,
    )
    buffer = io.BytesIO()
    writer = pa.ipc.new_stream(buffer, schema(head.metadata()))
    for number, entry in enumerate(segment.entries):
        batch, crc = convert_to_present_format(entry.rows())
        writer.write_batch(batch, custom_metadata=metadata_of({"record": number, **entry.header}, crc))
    # without a record Arrow has written no head
    write_durably(segment.path, buffer.getvalue() or schema(head.metadata()).serialize().to_pybytes())


def _keep_aside(path: Path) -> Path:
    """Return the place of a further name of a file, in the folder of damaged ones."""
    folder = path.parent / DAMAGED
    folder.mkdir(exist_ok=True)
    copy, count = folder / path.name, 1
    while copy.exists():
        count += 1
        copy = folder / f"{path.stem}-{count}{path.suffix}"
    try:
        os.link(path, copy)
    except OSError:  # not every file system has two names for a file
        shutil.copyfile(path, copy)
        sync(copy)
    sync(folder)
    return copy
