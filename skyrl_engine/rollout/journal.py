"""The journal of rollouts: every group that finished or was dropped, on the disk before it is trained on.

rollouts/
- segment-00000001.arrow, ...: Arrow IPC streams, which any Arrow reader opens. A group is one record batch, a row per attempt, and what
  belongs to all of it stands in the batch's metadata, with a CRC over both. So is a step that was trained, with what it learned from each
  attempt. Sessions that went on from a checkpoint are batches without rows.
- .lock: held by the process that writes

A session begins a segment of its own. What a crash left half-written at the end of one is cut; everything before it stays.
"""

import fcntl
import io
import json
import logging
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import define, field

from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.journal_index import CRC, FORMAT, HEADER, Entry, JournalIndex, number_of, read_index, run_of, segments_of
from skyrl_engine.rollout.records import (
    Learned,
    batch_of,
    batch_of_learned,
    no_rows,
    schema,
)
from skyrl_engine.run.durable import sync

if TYPE_CHECKING:
    import pyarrow as pa

COMMIT_SECONDS: Final = 0.1
"""Time in which groups share one wait for the disk."""

_SEGMENT_BYTES: Final = 64 * 2**20

logger = logging.getLogger(__name__)


@define
class Journal:
    """A journal that is being written. Made by `open_journal`; `close` it, or use it as a context."""

    folder: Path
    run: str
    keep: int | None
    index: JournalIndex
    """Groups that were in it when it was opened; those of this session are not added."""
    _lock: io.TextIOWrapper = field(repr=False)
    _clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    _file: Any = field(default=None, init=False, repr=False)
    _writer: Any = field(default=None, init=False, repr=False)
    _buffer: io.BytesIO = field(factory=io.BytesIO, init=False, repr=False)
    _size: int = field(default=0, init=False)
    _committed: float = field(default=float("-inf"), init=False)
    _dirty: bool = field(default=False, init=False)
    _until: dict[Path, int] = field(factory=dict, init=False)
    _step: int = field(default=0, init=False)
    _first_step: int = field(default=0, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- events --------------------------------------------------------------------------------------------------------------------

    def append(self, group: Group, *, failed: bool = False) -> None:
        """Write a group that finished, or that a filter wants to drop; `failed` says that too few of its attempts are left.

        The bytes are the kernel's when this returns, and on the disk within COMMIT_SECONDS of the next call, or with `commit`. Raises
        RolloutError where they cannot be written, ContractError for values that are not finite or not JSON.
        """
        header = {
            "event": "group",
            "ticket": group.ticket,
            "environment": group.environment,
            "task_key": group.task_key,
            "start_version": group.start_version,
            "newest_version": newest_version(group),
            "dropped": group.dropped,
            "failed": failed,
            "rewards": [each.reward for each in group.trajectories],
            "statuses": [each.status for each in group.trajectories],
        }
        self._write(*batch_of(group), header)
        self.poll()

    def trained(self, step: int, tickets: Sequence[int], learned: Sequence[Learned] = ()) -> None:
        """Write that `step` trained on `tickets`, and what it learned from their attempts, in the order of the tickets.

        Waits for the disk, and lets go of segments that are older than `keep` steps.
        """
        self._step = step
        counted = Counter(each.ticket for each in learned)
        attempts = [counted[ticket] for ticket in tickets]
        self._write(*batch_of_learned(learned), {"event": "trained", "step": step, "tickets": list(tickets), "attempts": attempts})
        self.commit()
        if self._until:
            self._expire(step)
        wide = self.keep is not None and step - self._first_step >= max(1, self.keep // 8)
        if wide or self._size > _SEGMENT_BYTES:
            self._begin_segment()

    def resumed(self, version: int) -> None:
        """Write that a session goes on from the checkpoint of `version`: what later weights sampled counts no more."""
        self._step = self._first_step = version
        self._write(no_rows(), 0, {"event": "resumed", "version": version})
        self.index.add(Entry("resumed", {"version": version}, self.folder, 0))
        self.commit()

    def poll(self) -> None:
        """Wait for the disk if the last time is long enough ago. Call it now and then while groups are sampled."""
        if self._dirty and self._clock() - self._committed >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Wait until everything that was written is on the disk: before every checkpoint, which counts on it."""
        if not self._dirty:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        self._dirty = False
        self._committed = self._clock()

    def close(self) -> None:
        """Commit, and let another process write."""
        try:
            if self._file is not None:
                self.commit()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._lock.close()

    # --- writing -------------------------------------------------------------------------------------------------------------------

    def _write(self, batch: "pa.RecordBatch", crc: int, header: Mapping[str, Any]) -> None:
        text = json.dumps(header, allow_nan=False)
        crc = zlib.crc32(text.encode(), crc)
        self._writer.write_batch(batch, custom_metadata={HEADER: text, CRC: f"{crc:08x}"})
        self._flush()

    def _flush(self) -> None:
        """Hand the bytes of the writer to the file; where that fails, take back what was written of them."""
        data = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        try:
            written = 0
            while written < len(data):
                written += self._file.write(memoryview(data)[written:])
        except OSError as error:
            try:
                os.ftruncate(self._file.fileno(), self._size)
            except OSError as again:
                logger.warning("%s ends in a torn record: %s", self._file.name, again)
            raise self._failed(error) from error
        self._size += len(data)
        self._dirty = True

    def begin(self) -> None:
        """Begin the session's first segment."""
        self._until = {path: step for path, step in self.index.ends.items() if path.exists()}
        self._begin_segment()

    def _begin_segment(self) -> None:
        import pyarrow as pa

        if self._file is not None:
            self.commit()
            self._until[Path(self._file.name)] = self._step
            self._file.close()
        self._first_step = self._step
        path = self.folder / f"segment-{max(map(number_of, segments_of(self.folder)), default=0) + 1:08d}.arrow"
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        self._size = 0
        self._buffer = io.BytesIO()
        self._writer = pa.ipc.new_stream(self._buffer, schema((("run", self.run), ("format", FORMAT))))
        self._flush()
        self.commit()
        try:
            sync(self.folder)
        except OSError as error:
            raise self._failed(error) from error

    def _expire(self, step: int) -> None:
        """Delete segments all of whose records are more than `keep` steps old; one that will not go costs space, never a run."""
        keep = self.keep
        if keep is None:
            return
        # the oldest alone: a later segment says what of an earlier one does not count
        for path in list(takewhile(lambda each: self._until[each] <= step - keep, sorted(self._until))):
            del self._until[path]
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot delete %s: %s", path, error)

    def _failed(self, error: OSError) -> RolloutError:
        return RolloutError(
            f"the journal of rollouts {self.folder} cannot be written ({error.strerror or error}); what was written before is whole",
            remedy="Free space there or make it writable, then resume the run with checkpoint.resume = true",
        )


def open_journal(
    folder: Path, *, run: str, keep: int | None = None, resumed: int | None = None, clock: Callable[[], float] = time.monotonic
) -> Journal:
    """Open the journal of a run, identified by the text `run`, to write; made where it is missing.

    `keep` steps stay (None: all). `resumed` is the step of the checkpoint that the session goes on from; one without it begins at step 0, where
    only what the first weights sampled counts. Raises RolloutError where another process writes it, it is another run's, or it cannot be
    read and written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise RolloutError(
            f"the journal of rollouts {folder} cannot be used ({error.strerror})", remedy="Make its directory readable and writable"
        ) from error
    try:
        _hold(lock, folder)
        _refuse_other_run(folder, run)
        index = _cut(folder)
        journal = Journal(folder, run, keep, index, lock, clock)
        journal.begin()
        if index.groups or index.trained or resumed is not None:
            journal.resumed(resumed or 0)
    except BaseException:
        lock.close()
        raise
    return journal


def _hold(lock: io.TextIOWrapper, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RolloutError(
            f"another process writes the journal of rollouts {folder}", remedy="Wait for it to end, or set another run.directory"
        ) from None
    except OSError as error:  # some network file systems have no locks; that must not keep a run from starting
        logger.warning("%s cannot be locked against a second process: %s", folder, error)


def _refuse_other_run(folder: Path, run: str) -> None:
    for segment in segments_of(folder):
        other = run_of(segment)
        if other is not None and other != run:
            raise RolloutError(
                f"{segment} holds rollouts of another run ({other}, and this is {run})",
                remedy=f"Move {folder} away, or set another run.directory",
            )


def _cut(folder: Path) -> JournalIndex:
    """Read the headers, and cut what a crash left half-written at the end of the last segment."""
    index = read_index(folder)
    last = segments_of(folder)[-1:]
    for damage in index.damages:
        logger.warning("%s", damage)
        if last == [damage.segment]:
            if damage.offset == 0:
                damage.segment.unlink()
            else:
                os.truncate(damage.segment, damage.offset)
    return index


def newest_version(group: Group) -> int:
    """Return the newest version of the weights that sampled a token of the group; its start version where nothing was sampled."""
    newest = [int(each.versions.versions[-1]) for each in group.trajectories if len(each.versions.versions)]
    return max([group.start_version, *newest])
