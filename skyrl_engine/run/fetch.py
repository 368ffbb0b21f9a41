"""A run directory as a store holds it: fetched aside, compared with its list, then put in place, checkpoints last."""

import json
import logging
import shutil
from pathlib import Path
from typing import Final

from skyrl_engine.errors import CheckpointError
from skyrl_engine.object_store.place import StorePlace
from skyrl_engine.object_store.snapshot import Snapshot, get_file, look
from skyrl_engine.run.checkpoint import remove_aside
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.durable import sync, sync_tree, write_durably
from skyrl_engine.run.log import tell

logger = logging.getLogger(__name__)

_TRIES: Final = 3
"""Copies that are begun while the run that writes them replaces each by the next."""


def fetch_into(place: StorePlace, directory: RunDirectory) -> Snapshot:
    """Bring the newest copy of a run into a run directory that has no checkpoint; return the copy.

    A process that ends meanwhile leaves no checkpoint there, so that the next one fetches again.

    Raises CheckpointError where there is no whole copy, and StoreError.
    """
    aside = directory.path / ".fetched.partial"
    missing: FileNotFoundError | None = None
    for _ in range(_TRIES):
        newest = look(place).newest
        if newest is None:
            raise CheckpointError(f"{place} holds no whole copy of a run", remedy="Correct the address, or start the run again")
        shutil.rmtree(aside, ignore_errors=True)
        tell(logger, f"fetching the run after step {newest.step} from {place}")
        try:
            for name, stored in newest.files.items():
                if not (aside / name).resolve().is_relative_to(aside.resolve()):
                    raise CheckpointError(f"{place} names a file outside of the run, {name!r}", remedy="Use a store that you trust")
                get_file(place, stored, aside / name)
        except FileNotFoundError as error:
            missing = error
            continue
        record_place(aside / directory.store.name, place, run=newest.run, number=newest.number)
        sync_tree(aside)
        _put_in_place(directory)
        return newest
    shutil.rmtree(aside, ignore_errors=True)
    raise CheckpointError(
        f"{place} has a list of files, and not all of them", remedy="Restore the store from a copy, or start the run again"
    ) from missing


def record_place(file: Path, place: StorePlace, *, run: str, number: int) -> None:
    """Write down which copy in which place a run directory is, or brings: no later one is its own."""
    write_durably(file, json.dumps({"address": str(place), "run": run, "number": number}) + "\n")


def _put_in_place(directory: RunDirectory) -> None:
    aside = directory.path / ".fetched.partial"
    fetched = aside / directory.checkpoints.name
    for entry in sorted(aside.iterdir()):
        target = directory.path / entry.name
        # a session writes its log meanwhile
        if entry != fetched and (target != directory.log or not target.exists()):
            if target.is_dir():
                remove_aside(target)
            entry.replace(target)
    directory.checkpoints.mkdir(exist_ok=True)
    for entry in sorted(fetched.iterdir()):
        if entry.is_dir():
            entry.replace(directory.checkpoints / entry.name)
    sync(directory.checkpoints)
    sync(directory.path)
    write_durably(directory.checkpoints / "latest", (fetched / "latest").read_bytes())
    shutil.rmtree(aside)
