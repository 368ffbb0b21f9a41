"""Writes that survive a crash: a reader sees the old file or the new one, and what was reported as written is on the disk."""

import os
from pathlib import Path


def write_durably(path: Path, content: bytes | str) -> None:
    """Replace `path` in one step by a file that holds `content` (text is UTF-8), fsynced together with its directory."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """`sync` every file and directory under `root`, and `root` itself, children before their directory."""
    for directory, _, files in os.walk(root, topdown=False):
        for name in files:
            sync(Path(directory, name))
        sync(Path(directory))
