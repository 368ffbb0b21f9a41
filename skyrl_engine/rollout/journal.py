"""The journal of rollouts: every group that finished or was dropped, on the disk before it is trained on.

rollouts/
- segment-00000001.arrow, ...: Arrow IPC streams, which any Arrow reader opens. A group is one record batch, a row per attempt, and what
  belongs to all of it is in the batch's metadata, with a CRC over both. So is a step that was trained, with what it learned from each
  attempt. Sessions that went on from a checkpoint are batches without rows.
- damaged/: files of which a part could not be read, as they were; what could be read is in new ones in their places
- .lock: held by the process that writes

A session begins a segment of its own. What a crash left half-written at the end of one is cut; everything before it stays.
"""

import fcntl
import io
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import define, field

from skyrl_engine.cleanup import close_after
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.arrow_codec import (
    LearnedAttempt,
    batch_of,
    encode_learned,
    no_rows,
    schema,
)
from skyrl_engine.rollout.journal_index import JournalIndex, Listing, read_index
from skyrl_engine.rollout.messages import metadata_of
from skyrl_engine.rollout.repair import repair
from skyrl_engine.rollout.segments import Head, number_of, path_of
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
    _records: int = field(default=0, init=False)
    _until: dict[Path, int] = field(factory=dict, init=False)
    _numbers: dict[Path, int] = field(init=False)
    _sizes: dict[int, int] = field(init=False)
    _step: int = field(default=0, init=False)
    _first_step: int = field(default=0, init=False)

    @_numbers.default
    def _numbers_of_index(self) -> dict[Path, int]:
        return {segment.path: segment.number for segment in self.index.segments}

    @_sizes.default
    def _sizes_of_index(self) -> dict[int, int]:
        return {segment.number: segment.size for segment in self.index.segments}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close_after(error, self.close)

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
            "rewards": [trajectory.reward for trajectory in group.trajectories],
            "statuses": [trajectory.status for trajectory in group.trajectories],
        }
        self._write(*batch_of(group), header)
        self.poll()

    def record_step(self, step: int, tickets: Sequence[int], learned: Sequence[LearnedAttempt] = ()) -> None:
        """Write that `step` trained on `tickets`, and what it learned from their attempts, in the order of the tickets.

        Waits for the disk, and lets go of segments that are older than `keep` steps.
        """
        self._step = step
        counted = Counter(attempt.ticket for attempt in learned)
        attempts = [counted[ticket] for ticket in tickets]
        self._write(*encode_learned(learned), {"event": "trained", "step": step, "tickets": list(tickets), "attempts": attempts})
        self.commit()
        wide = self.keep is not None and step - self._first_step >= max(1, self.keep // 8)
        if wide or self._size > _SEGMENT_BYTES:
            self._begin_segment()
            self.delete_expired()

    def record_resume(self, version: int) -> None:
        """Write that a session goes on from the checkpoint of `version`: what later weights sampled counts no more."""
        self._write(no_rows(), 0, {"event": "resumed", "version": version})
        self.index.go_on_from(version)
        self.commit()

    def listing(self) -> dict[str, int]:
        """Return the segments that are there, with the bytes of each that are on the disk: what a checkpoint counts on."""
        self.commit()
        sizes = {**self._sizes, self._numbers[Path(self._file.name)]: self._size}
        return {path_of(self.folder, number).name: size for number, size in sorted(sizes.items())}

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
            raise self._write_error(error) from error
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
        self._writer.write_batch(batch, custom_metadata=metadata_of({**header, "record": self._records}, crc))
        self._flush()
        self._records += 1

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
            raise self._write_error(error) from error
        self._size += len(data)
        self._dirty = True

    def begin(self, resumed: int | None = None) -> None:
        """Begin the session's first segment, which says the version of the checkpoint that it goes on from."""
        self._until = {path: step for path, step in self.index.ends.items() if path.exists()}
        self._step = 0 if resumed is None else resumed
        self._begin_segment(resumed)
        if resumed is not None:
            self.record_resume(resumed)

    def _begin_segment(self, resumed: int | None = None) -> None:
        import pyarrow as pa

        if self._file is not None:
            self.commit()
            self._until[Path(self._file.name)] = self._step
            self._sizes[self._numbers[Path(self._file.name)]] = self._size
            self._file.close()
        self._first_step = self._step
        self.index.newest += 1
        for old in self._list_expired_segments():
            self.index.oldest = max(self.index.oldest, self._numbers[old] + 1)
        head = Head(self.run, self.index.newest, self.index.oldest, resumed)
        path = path_of(self.folder, head.number)
        self._numbers[path] = head.number
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise self._write_error(error) from error
        self._size = self._records = 0
        self._buffer = io.BytesIO()
        self._writer = pa.ipc.new_stream(self._buffer, schema(head.metadata()))
        # Arrow writes the schema with the first batch; the head comes before
        self._writer.write_batch(no_rows())
        self._buffer.truncate(8 + int.from_bytes(self._buffer.getvalue()[4:8], "little"))
        self._flush()
        self.commit()
        try:
            sync(self.folder)
        except OSError as error:
            raise self._write_error(error) from error

    def _list_expired_segments(self) -> list[Path]:
        """Return the segments all of whose records are more than `keep` steps old.

        They are the oldest alone: a later segment says what of an earlier one does not count.
        """
        expired = []
        for path in sorted(self._until, key=self._numbers.__getitem__):
            if self.keep is None or self._until[path] > self._step - self.keep:
                break
            expired.append(path)
        return expired

    def delete_expired(self) -> None:
        """Delete segments that have expired, which the newest segment says; one that will not go costs space, never a run."""
        for path in self._list_expired_segments():
            del self._until[path]
            self._sizes.pop(self._numbers[path], None)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot delete %s: %s", path, error)

    def _write_error(self, error: OSError) -> RolloutError:
        return RolloutError(
            f"the journal of rollouts {self.folder} cannot be written ({error.strerror or error}); what was written before is whole",
            remedy="Free space there or make it writable, then resume the run with checkpoint.resume = true",
        )


def open_journal(
    folder: Path,
    *,
    run: str,
    keep: int | None = None,
    resumed: int | None = None,
    listed: Listing | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Journal:
    """Open the journal of a run, identified by the text `run`, to write; made where it is missing.

    `keep` steps stay (None: all). `resumed` is the step of the checkpoint that the session goes on from, and `listed` the segments that it
    counts on; a session without one begins at step 0, where only what the first weights sampled counts. It warns of what is lost or damaged,
    and keeps damaged files aside. Raises RolloutError where another process writes it, it is another run's, or it cannot be read and written.
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
        index = read_index(folder, listed)
        _refuse_other_run(index, run)
        if repair(folder, index, run):
            index = read_index(folder, listed)
        for loss in index.losses:
            logger.warning("the journal of rollouts %s lacks what was recorded: %s", folder, loss)
        if index.losses and (listed or resumed is not None):
            logger.warning("what is lost of the groups that this run goes on with is sampled again, under the same seeds")
        index.newest = max([index.newest, *map(number_of, (Path(name) for name in listed or ()))])
        journal = Journal(folder, run, keep, index, lock, clock)
        journal.begin(0 if resumed is None and index.segments else resumed)
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


def _refuse_other_run(index: JournalIndex, run: str) -> None:
    for segment in index.segments:
        if segment.run is not None and segment.run != run:
            raise RolloutError(
                f"{segment.path} holds rollouts of another run ({segment.run}, and this is {run})",
                remedy=f"Move {segment.path.parent} away, or set another run.directory",
            )


def newest_version(group: Group) -> int:
    """Return the newest version of the weights that sampled a token of the group; its start version where nothing was sampled."""
    newest = [int(trajectory.versions.versions[-1]) for trajectory in group.trajectories if len(trajectory.versions.versions)]
    return max([group.start_version, *newest])
