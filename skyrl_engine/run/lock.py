"""The lock of a run directory: one process works there at a time, and its name stands in the lock for as long as it does.

The kernel lets go of a lock when its process ends, however it ends. A name that stands in the file afterwards is that of a killed process.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from attrs import asdict, frozen

from skyrl_engine.errors import EngineError
from skyrl_engine.run.manifest import now

Work = Literal["run", "prune"]

_TRIES = 10
_PAUSE = 0.02
"""Seconds between two tries: `look_at_lock` of another process holds the lock for microseconds."""

logger = logging.getLogger(__name__)


@frozen
class LockHolder:
    """The process that took a lock: `since` is UTC, ISO 8601; `work` says why it did."""

    host: str
    pid: int
    since: str
    work: Work = "run"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@frozen
class LockView:
    """A lock as another process sees it. `holder` is the process whose name stands in it: the present one, or one that was killed.

    `unknown`: that process is one of another host, or the file cannot be read, so that nobody here can say if it lives.
    """

    status: Literal["held", "free", "unknown"]
    holder: LockHolder | None = None


@contextmanager
def hold_lock(path: Path, work: Work = "run") -> Iterator[None]:
    """Hold the lock `path` for this process. Raises EngineError when another process holds it, and OSError where nothing can be written."""
    with path.open("a+") as lock:
        _take(lock, path)
        _write(lock, json.dumps(asdict(LockHolder(socket.gethostname(), os.getpid(), now(), work))) + "\n")
        try:
            yield
        finally:
            _write(lock, "")


def _take(lock: "IO[Any]", path: Path) -> None:
    for tries_left in reversed(range(_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if tries_left:
                time.sleep(_PAUSE)
                continue
            holder = _read_holder(path)
            raise EngineError(
                f"another process is running in {path.parent}{'' if holder is None else f': {holder}'}",
                remedy="Wait for it to end, or set another run.directory",
            ) from None
        except OSError as error:  # some network file systems have no locks; that must not keep a run from starting
            logger.warning("%s cannot be locked against a second process: %s", path.parent, error)
        return


def _write(lock: "IO[Any]", text: str) -> None:
    """Write the holder's name, which nothing but the state that others see depends on."""
    try:
        lock.seek(0)
        lock.truncate()
        lock.write(text)
        lock.flush()
    except OSError as error:
        logger.warning("%s cannot be written: %s", lock.name, error)


def look_at_lock(path: Path) -> LockView:
    """Say if a process holds the lock `path`, without waiting for it and without keeping others from taking it."""
    try:
        lock = path.open("rb")
    except FileNotFoundError:
        return LockView("free")
    except OSError:
        return LockView("unknown")
    holder = _read_holder(path)
    here = holder is None or holder.host == socket.gethostname()
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return LockView("held", holder)
        except OSError:  # a file system without locks: the process itself is asked
            if holder is None or not here:
                return LockView("unknown", holder)
            return LockView("held" if _is_alive(holder.pid) else "free", holder)
    # not every network file system shows one host the locks of another
    return LockView("free" if here else "unknown", holder)


def _read_holder(path: Path) -> LockHolder | None:
    try:
        table = json.loads(path.read_text())
        return LockHolder(str(table["host"]), int(table["pid"]), str(table["since"]), table["work"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
