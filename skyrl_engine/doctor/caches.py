"""Sizes of the folders that fill up in silence."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from skyrl_engine.doctor.finding import DoctorFinding
from skyrl_engine.model_facts.memory import format_bytes

_PATIENCE_SECONDS = 2.0


def examine_caches() -> Iterator[DoctorFinding]:
    """Yield what caches of tokens, models and datasets take on the disk."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from skyrl_engine.data.table.cache import TokenCache

    datasets = os.environ.get("HF_DATASETS_CACHE") or Path(HF_HUB_CACHE).parent / "datasets"
    for topic, folder in (
        ("cache of tokens", TokenCache.of(None).directory),
        ("cache of models", Path(HF_HUB_CACHE)),
        ("cache of datasets", Path(datasets)),
    ):
        if not folder.is_dir():
            yield DoctorFinding(topic, "ok", f"none at {folder}")
            continue
        size, counted = measure_folder(folder, _PATIENCE_SECONDS)
        yield DoctorFinding(topic, "ok", f"{'' if counted else 'at least '}{format_bytes(size)} at {folder}")


def measure_folder(root: Path, patience: float) -> tuple[int, bool]:
    """Return the bytes of the files below a folder, links not followed, and whether all were counted within `patience` seconds."""
    end, size, folders = time.monotonic() + patience, 0, [root]
    while folders:
        if time.monotonic() > end:
            return size, False
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif not entry.is_symlink():
                size += entry.stat(follow_symlinks=False).st_size
    return size, True
