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
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from attrs import define, field, frozen

from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.ledger import Recorded
from skyrl_engine.rollout.records import (
    Learned,
    batch_of,
    batch_of_learned,
    checksum_of,
    columns_of,
    group_of,
    learned_of,
    no_rows,
    schema,
)
from skyrl_engine.run.durable import sync

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Final = "2"
COMMIT_SECONDS: Final = 0.1
"""Time in which groups share one wait for the disk."""

_SEGMENT: Final = re.compile(r"segment-(\d{8,})\.arrow")
_SEGMENT_BYTES: Final = 64 * 2**20
_HEADER, _CRC = b"rollouts", b"crc32"

logger = logging.getLogger(__name__)

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
    segments = _segments(folder)
    for place, segment in enumerate(segments):
        if place and _number(segment) != _number(segments[place - 1]) + 1:
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
        self._writer.write_batch(batch, custom_metadata={_HEADER: text, _CRC: f"{crc:08x}"})
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
        numbers = [int(match[1]) for each in _segments(self.folder) if (match := _SEGMENT.fullmatch(each.name))]
        path = self.folder / f"segment-{max(numbers, default=0) + 1:08d}.arrow"
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
    for segment in _segments(folder):
        other = run_of(segment)
        if other is not None and other != run:
            raise RolloutError(
                f"{segment} holds rollouts of another run ({other}, and this is {run})",
                remedy=f"Move {folder} away, or set another run.directory",
            )


def _cut(folder: Path) -> JournalIndex:
    """Read the headers, and cut what a crash left half-written at the end of the last segment."""
    index = read_index(folder)
    last = _segments(folder)[-1:]
    for damage in index.damages:
        logger.warning("%s", damage)
        if last == [damage.segment]:
            if damage.offset == 0:
                damage.segment.unlink()
            else:
                os.truncate(damage.segment, damage.offset)
    return index


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


def newest_version(group: Group) -> int:
    """Return the newest version of the weights that sampled a token of the group; its start version where nothing was sampled."""
    newest = [int(each.versions.versions[-1]) for each in group.trajectories if len(each.versions.versions)]
    return max([group.start_version, *newest])


# --- reading -----------------------------------------------------------------------------------------------------------------------


def _number(segment: Path) -> int:
    return int(segment.stem.removeprefix("segment-"))


def _segments(folder: Path) -> list[Path]:
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
    text, written = metadata[_HEADER], metadata[_CRC]
    crc = 0 if batch.num_rows == 0 else checksum_of(columns_of(batch))
    if f"{zlib.crc32(text, crc):08x}" != written.decode():
        raise ValueError("a checksum differs")
    header: dict[str, Any] = json.loads(text)
    return header


def _refuse_other_format(segment: Path, schema: "pa.Schema") -> None:
    found = (schema.metadata or {}).get(b"format", b"?").decode()
    if found != FORMAT:
        raise RolloutError(
            f"{segment} is no journal of rollouts of format {FORMAT} ({found})", remedy="Use the engine version that wrote it"
        )
