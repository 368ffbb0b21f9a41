"""Remember what was read of installed distributions, until one is installed or removed, or one that offers plugins is changed in place.

Reading the metadata of 250 distributions takes 20 ms, and a command asks once for each plugin. pip and uv write a distribution's folder
anew, so that the time of the folder around it tells; a process that lasts sees plugins come and go.
"""

import os
import sys
from collections.abc import Callable, Hashable
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OFFERING = b"skyrl_engine."
"""Stands in the entry points of every distribution with plugins, commands or trainers."""

State = tuple[Hashable, ...]


def read_state() -> State:
    """Return what is equal while the distributions on sys.path stay the same."""
    return tuple(
        (entry, time, *map(_state_of_files, _list_offering(entry, time))) for entry in sys.path for time in (_time(entry),)
    )


def _time(path: str) -> int | None:
    """Return when the list of names in a folder, or a file, changed, in nanoseconds; None where nothing is there."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


@cache
def _list_offering(entry: str, time: int | None) -> tuple[Path, ...]:  # noqa: ARG001 - the time is what the answer is remembered by
    """Return the metadata folders in one place of sys.path that offer something to the engine, or might: unreadable or half installed."""
    try:
        with os.scandir(entry or ".") as places:
            folders = [Path(place.path) for place in places if place.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return ()
    return tuple(folder for folder in folders if _may_offer(folder))


def _may_offer(folder: Path) -> bool:
    try:
        return OFFERING in (folder / "entry_points.txt").read_bytes()
    except FileNotFoundError:
        return not (folder / "RECORD").exists()  # which an installer writes last
    except OSError:
        return True


def _state_of_files(folder: Path) -> State:
    return (folder, *(_state_of_file(folder / name) for name in ("METADATA", "PKG-INFO", "entry_points.txt")))


def _state_of_file(path: Path) -> State | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def remember_while_unchanged(read: Callable[P, R]) -> Callable[P, R]:
    """Let a function of hashable arguments read anew only after installed distributions changed; an error is not remembered."""
    known: dict[Hashable, R] = {}
    state: State | None = None

    @wraps(read)
    def read_or_remember(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal state
        now = read_state()
        if now != state:
            known.clear()
            state = now
        key = (args, tuple(sorted(kwargs.items())))
        if key not in known:
            known[key] = read(*args, **kwargs)
        return known[key]

    return read_or_remember
