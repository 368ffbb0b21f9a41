"""Sizes and SHA-256 sums of a directory's files: how a damaged checkpoint is distinguished from a whole one."""

import hashlib
import heapq
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict


class FileFacts(TypedDict):
    bytes: int
    sha256: str


def list_files(root: Path) -> dict[str, FileFacts]:
    """Every file under `root` by its relative POSIX path."""
    return sum_files(root, sorted(find_files(root)))


def find_files(root: Path) -> dict[str, int]:
    """Return the bytes of every file under `root`, by its relative POSIX path."""
    return {path.relative_to(root).as_posix(): path.stat().st_size for path in root.rglob("*") if path.is_file()}


def sum_files(root: Path, names: Sequence[str]) -> dict[str, FileFacts]:
    """Return size and sum of these files under `root`."""
    return {name: _facts(root / name) for name in names}


def share_files(sizes: Mapping[str, int], shares: int) -> list[list[str]]:
    """Divide files into shares of about as many bytes, the largest first; the same for the same sizes."""
    heap: list[tuple[int, int, list[str]]] = [(0, number, []) for number in range(shares)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        total, number, names = heapq.heappop(heap)
        heapq.heappush(heap, (total + sizes[name], number, [*names, name]))
    return [names for _, _, names in sorted(heap, key=lambda share: share[1])]


def first_damage(root: Path, expected: dict[str, FileFacts], *, but: str) -> str | None:
    """A clause naming the first file under `root` that is not as listed, None when all are. Sizes are looked at before sums.

    No file may be there that is not listed, except `but`, the listing.
    """
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    if unlisted := sorted(present - expected.keys() - {but}):
        return f"{unlisted[0]} is not one of its files"
    for name, facts in expected.items():
        path = root / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{name} has {size} bytes instead of {facts['bytes']}"
    for name, facts in expected.items():
        if _facts(root / name)["sha256"] != facts["sha256"]:
            return f"the content of {name} differs from what was written"
    return None


def count_bytes(root: Path) -> int:
    """Return the bytes of a file, or of all files under a folder, each once; links are not followed, and what goes meanwhile counts nothing."""
    total, seen, folders = 0, set[tuple[int, int]](), [root]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(folder)) if folder.is_dir() else []
            total += 0 if entries or folder.is_dir() else folder.lstat().st_size
        except OSError:
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                    continue
                facts = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if facts.st_nlink > 1 and (facts.st_dev, facts.st_ino) in seen:
                continue
            seen.add((facts.st_dev, facts.st_ino))
            total += facts.st_size
    return total


def _facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
