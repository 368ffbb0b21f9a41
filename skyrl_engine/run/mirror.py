"""The copy of a run directory in an object store: after every checkpoint the folder as it is then, whole or absent.

- Everything that a resumed run reads is copied: whole checkpoints, the journal of rollouts, references, run.json, config.toml, metrics,
  samples, log and report; at the end of a session also the trained model.
- What changes in place is not read later than the copy begins: files that are replaced are read then, of those that grow the length is kept.
- Files that the store holds already, by size and sum, are not sent again, so a copy costs what is new.
- A copy under way is the only one, and no checkpoint is deleted meanwhile.
- A copy that fails is warned of, and the next one brings everything; the end of a session raises what its last one met.
"""

import hashlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, Self

from attrs import define, field, frozen

from skyrl_engine.errors import CheckpointError, EngineError, StoreError
from skyrl_engine.object_store.place import StorePlace
from skyrl_engine.object_store.snapshot import Contents, Snapshot, StoredObject, delete, look, put_bytes, put_file
from skyrl_engine.run.checkpoint import LISTING, CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.fetch import fetch_into, record_place
from skyrl_engine.workers.listing import FileFacts

logger = logging.getLogger(__name__)

_IN_MEMORY: Final = 64 * 2**20
"""Bytes up to which a file that grows is read at once."""


@frozen(eq=False)
class _Source:
    """A file as it was when a copy began: `content` of one that may be replaced, or the first `size` bytes of `opened`, of one that grows
    or may be deleted; `sha256` where it is known.
    """

    path: Path
    size: int
    content: bytes | None = None
    opened: BinaryIO | None = None
    sha256: str | None = None


@define(eq=False)
class Mirror:
    """Copies one run into one place of a store."""

    place: StorePlace
    directory: RunDirectory
    asynchronous: bool
    run: str
    number: int = 0
    _thread: threading.Thread | None = field(default=None, init=False)
    _error: EngineError | None = field(default=None, init=False)
    _sums: dict[tuple[Path, int, int], str] = field(factory=dict, init=False)

    @classmethod
    def open(cls, address: str, directory: RunDirectory, *, resumes: bool, asynchronous: bool) -> Self:
        """Hold the store against the run directory, and fetch the run where the directory has no checkpoint and the store has one.

        Raises StoreError for a store that cannot be read and written, CheckpointError for one that holds something else than this run.
        """
        place = StorePlace.of(address)
        contents = look(place)
        newest = contents.newest
        if newest is None and contents.foreign:
            raise CheckpointError(
                f"{place} holds files that belong to no run, such as {contents.foreign[0]!r}",
                remedy="Name a new or empty place in checkpoint.store",
            )
        if newest is not None and not resumes:
            raise CheckpointError(
                f"{place} already holds a run",
                remedy="Name a new place in checkpoint.store, or set checkpoint.resume = true to continue that run",
            )
        probe = place / f"{contents.next_number:08d}/probe"
        put_bytes(probe, b"can this place be written?\n")
        delete(probe)
        if newest is not None and CheckpointStore(directory.checkpoints).latest() is None:
            newest = fetch_into(place, directory)
        run, number = _recall(directory, place)
        mirror = cls(place, directory, asynchronous, run, number)
        if newest is not None:
            mirror._refuse_other(newest)
        return mirror

    def copy(self, step: int, *, with_model: bool = False) -> None:
        """Copy the directory as it is now, after the copy under way; where it is `asynchronous`, in a thread."""
        self.wait()
        sources = {source.path.relative_to(self.directory.path).as_posix(): source for source in self._list(with_model=with_model)}
        if self.asynchronous:
            self._thread = threading.Thread(target=self._keep_error, args=(step, sources), name="copy to the store", daemon=True)
            self._thread.start()
        else:
            self._keep_error(step, sources)
            self.wait(last=with_model)

    def wait(self, *, last: bool = False) -> None:
        """Wait for the copy under way. Warns of a store that failed; of the last copy that is raised.

        Raises CheckpointError where another process goes on with the run in the same place.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if isinstance(error, StoreError) and not last:
            logger.warning("%s. The next checkpoint is copied with all that is missing", error.cause)
        elif error is not None:
            raise error

    def _keep_error(self, step: int, sources: Mapping[str, _Source]) -> None:
        try:
            self._send(step, sources)
        except EngineError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - `wait` raises it or warns of it
            self._error = StoreError(
                f"the run cannot be copied to {self.place} ({type(error).__name__}: {error})",
                remedy="Make its files readable, and resume the run",
            )
        finally:
            for source in sources.values():
                if source.opened is not None:
                    source.opened.close()

    def _send(self, step: int, sources: Mapping[str, _Source]) -> None:
        contents = look(self.place)
        if contents.newest is not None:
            self._refuse_other(contents.newest)
        number = contents.next_number
        held = {} if contents.newest is None else {(file.bytes, file.sha256): file for file in contents.newest.files.values()}
        files = {name: self._send_file(name, source, number, held) for name, source in sources.items()}
        record_place(self.directory.store, self.place, run=self.run, number=number)
        self.number = number
        snapshot = Snapshot(number, self.run, step, files)
        put_bytes(self.place / f"{number:08d}.json", snapshot.write())
        logger.info("%s holds the run after step %d", self.place, step)
        self._expire(Contents(self.place.find(), snapshot))

    def _send_file(self, name: str, source: _Source, number: int, held: Mapping[tuple[int, str], StoredObject]) -> StoredObject:
        place, content, sha256 = self.place / f"{number:08d}" / name, source.content, source.sha256
        if source.opened is not None and source.size <= _IN_MEMORY:
            content = b"".join(_blocks(source))
        if sha256 is None:
            sha256 = _sum(_blocks(source) if content is None else (content,))
        if source.opened is not None:
            self._sums[_key(source.path, os.fstat(source.opened.fileno()))] = sha256
        if (known := held.get((source.size, sha256))) is not None:
            return known
        if content is not None:
            put_bytes(place, content)
        elif source.opened is None:
            put_file(place, source.path, source.size)
        else:
            self._send_start(place, source)
        return StoredObject(f"{number:08d}/{name}", source.size, sha256)

    def _send_start(self, place: StorePlace, source: _Source) -> None:
        """Send the first bytes of a large file that grows, by a copy of them: clients of stores send many parts of a file at once."""
        start = self.directory.path / ".copy.partial"
        try:
            with start.open("wb") as copy:
                for block in _blocks(source):
                    copy.write(block)
            put_file(place, start, source.size)
        finally:
            start.unlink(missing_ok=True)

    def _expire(self, contents: Contents) -> None:
        try:
            for name in contents.list_expired():
                delete(self.place / name)
        except StoreError as error:
            logger.warning("%s; what the run no longer needs stays there until its next copy", error.cause)

    def _refuse_other(self, newest: Snapshot) -> None:
        if newest.run != self.run:
            raise CheckpointError(f"{self.place} holds another run", remedy="Name another place in checkpoint.store")
        if newest.number > self.number:
            raise CheckpointError(
                f"{self.place} holds a copy of this run after step {newest.step} that another process than that of {self.directory.path} wrote",
                remedy="Resume in an empty run.directory, which fetches that copy, or name another place in checkpoint.store",
            )

    def _list(self, *, with_model: bool) -> Iterator[_Source]:
        """Yield the files of the run as they are now."""
        run = self.directory
        for checkpoint in CheckpointStore(run.checkpoints).all():
            listing: dict[str, FileFacts] = json.loads((checkpoint.path / LISTING).read_text())
            for name, facts in listing.items():
                yield _Source(checkpoint.path / name, facts["bytes"], sha256=facts["sha256"])
            yield _replaced(checkpoint.path / LISTING)
        for path in (run.checkpoints / "latest", run.manifest, run.config, run.samples, run.report):
            if path.is_file():
                yield _replaced(path)
        for path in (run.metrics, run.log, *_walk(run.rollouts), *_walk(run.reference), *(_walk(run.model) if with_model else ())):
            if path.is_file():
                facts = path.stat()
                known = self._sums.get(_key(path, facts))
                # a sum that is known was of a file that the newest copy holds
                yield _Source(path, facts.st_size, sha256=known) if known else _Source(path, facts.st_size, opened=path.open("rb"))


def _key(path: Path, facts: os.stat_result) -> tuple[Path, int, int]:
    return path, facts.st_size, facts.st_mtime_ns


def _walk(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _replaced(path: Path) -> _Source:
    content = path.read_bytes()
    return _Source(path, len(content), content)


def _blocks(source: _Source) -> Iterator[bytes]:
    """Yield the first bytes of a file. Raises OSError where it has become shorter."""
    assert source.opened is not None, "only files that grow are read in blocks"
    source.opened.seek(0)
    left = source.size
    while left > 0:
        block = source.opened.read(min(left, 2**23))
        if not block:
            raise OSError(f"{source.path} has become shorter")
        left -= len(block)
        yield block


def _sum(blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _recall(directory: RunDirectory, place: StorePlace) -> tuple[str, int]:
    """Return the name by which a store knows the run, and the number of its last copy there; a new name where there is none."""
    try:
        document = json.loads(directory.store.read_text())
        run, number = str(document["run"]), int(document["number"])
    except FileNotFoundError:
        run, number = uuid.uuid4().hex, 0
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{directory.store} cannot be read ({error})",
            remedy="Resume in an empty run.directory, which fetches the run from its store",
        ) from error
    else:
        if document.get("address") == str(place):
            return run, number
        number = 0
    record_place(directory.store, place, run=run, number=number)
    return run, number
