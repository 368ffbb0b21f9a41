"""Temporary folders that go with the process that made them, however it ends.

The process holds a lock on a file in its folder. The kernel takes the lock away when the process ends, so a folder whose lock nobody holds was
left by a process that was killed: whoever makes the next temporary folder deletes it.
"""

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "skyrl-engine-"
KEPT_SECONDS: Final = 7 * 86_400.0
"""A folder that was left on purpose stays so long."""

_LOCK: Final = ".lock"
_KEPT: Final = ".kept"


class ScratchFolder:
    """A temporary folder at `path`, empty at first, deleted by `close`, at the end of this process, or after that by another one."""

    def __init__(self, purpose: str) -> None:
        _delete_abandoned_folders()
        self._outer = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
        self._end = weakref.finalize(self, _end, self._outer, _lock(self._outer), os.getpid())
        self.path = self._outer / purpose
        self.path.mkdir()

    def keep(self) -> None:
        """Leave the folder where it is when it is closed, since somebody was told to look into it; others delete it after a week."""
        with suppress(OSError):
            (self._outer / _KEPT).touch()

    def close(self) -> None:
        """Delete the folder. A second call does nothing."""
        self._end()


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Give the path of a temporary folder, which is deleted after the body."""
    folder = ScratchFolder(purpose)
    try:
        yield folder.path
    finally:
        folder.close()


def delete_file(path: Path) -> None:
    """Delete a file of another process, and with it the temporary folder that it stands alone in, where it does."""
    path.unlink()
    outer = path.parents[1]
    if outer.name.startswith(PREFIX) and is_scratch_folder(outer):
        shutil.rmtree(outer, ignore_errors=True)


def is_scratch_folder(folder: Path) -> bool:
    """Return True for a folder of this module: it is in use, or goes when the next one is made."""
    return (folder / _LOCK).exists()


def _lock(folder: Path) -> int | None:
    """Lock a new folder and return the descriptor that holds the lock; None on a file system without locks, where nobody else deletes it."""
    unnamed = folder / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    # it has its name once it is locked: nobody takes the folder for an abandoned one in between
    unnamed.rename(folder / _LOCK)
    return descriptor


def _end(folder: Path, descriptor: int | None, process: int) -> None:
    if os.getpid() != process:  # a fork's copy
        return
    if not (folder / _KEPT).exists():
        shutil.rmtree(folder, ignore_errors=True)
    if descriptor is not None:
        os.close(descriptor)


def _delete_abandoned_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # deleted by now, or no folder of this module
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = folder / _KEPT
            if not kept.exists() or time.time() - kept.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its process lives
            continue
        finally:
            os.close(descriptor)
