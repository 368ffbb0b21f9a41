"""Copies of a folder in a store, each of which is whole once a list of its files is there, and absent before.

ADDRESS/
- 00000007.json: the list of copy 7: of every file its name in the folder, its size and SHA-256, and the object that holds it. Written last.
- 00000007/checkpoints/step-00000010/state/...: the objects that copy 7 brought. Files that an earlier copy brought stay where they are.

No object is ever written twice under one name, and none is renamed. What no list names is left over from an interrupted copy.
"""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from attrs import asdict, frozen

from skyrl_engine.errors import StoreError
from skyrl_engine.object_store.place import StorePlace

logger = logging.getLogger(__name__)

_LIST: Final = re.compile(r"(\d{8})\.json")
_OBJECT: Final = re.compile(r"(\d{8})/.+")
_FORMAT: Final = 1
_WITH_FOLDERS: Final = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs", "webdav"})
"""Protocols of file systems in which a file needs its folder. Others have none, and would make a bucket in its place."""


@frozen
class StoredObject:
    """A file of a copy: the object's name below the address, its bytes, and the sum of its content."""

    key: str
    bytes: int
    sha256: str


@frozen(eq=False)
class Snapshot:
    """Copy number `number` of the run `run`, after optimizer step `step`: its files by their names in the folder."""

    number: int
    run: str
    step: int
    files: Mapping[str, StoredObject]

    def write(self) -> bytes:
        """Return the list as it is stored, with a sum of itself: a store may show half of an object."""
        body = {**asdict(self), "format": _FORMAT, "files": {name: asdict(file) for name, file in sorted(self.files.items())}}
        return (json.dumps({"sha256": _sum(body), "list": body}, indent=1) + "\n").encode()

    @classmethod
    def read(cls, content: bytes) -> Self | None:
        """Read what `write` returned; None for anything else. Raises StoreError for a list of another version of the engine."""
        try:
            document = json.loads(content)
            body = document["list"]
            if document["sha256"] != _sum(body):
                return None
            stated = body.pop("format")
            if stated != _FORMAT:
                raise StoreError(
                    f"the copy of a run has the format {stated}, and this engine reads {_FORMAT}",
                    remedy="Use the version of skyrl-engine that wrote it",
                )
            files = {name: StoredObject(**facts) for name, facts in body.pop("files").items()}
            return cls(**body, files=files)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def _sum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@frozen(eq=False)
class Contents:
    """The content of a store when it was listed: sizes by name, and the newest whole copy."""

    sizes: Mapping[str, int]
    newest: Snapshot | None

    @property
    def foreign(self) -> list[str]:
        """Names that no copy has."""
        return [name for name in self.sizes if not _LIST.fullmatch(name) and not _OBJECT.fullmatch(name)]

    @property
    def next_number(self) -> int:
        """A number that no copy has had, interrupted ones included."""
        matches = [_LIST.fullmatch(name) or _OBJECT.fullmatch(name) for name in self.sizes]
        return 1 + max((int(match[1]) for match in matches if match), default=0)

    def list_expired(self) -> list[str]:
        """Return what `newest` does not need and no later copy brings: lists first, since what they name goes with them."""
        if self.newest is None:
            return []
        last, needed = self.newest.number, {file.key for file in self.newest.files.values()}
        lists = [name for name in self.sizes if (match := _LIST.fullmatch(name)) and int(match[1]) < last]
        objects = [
            name for name in self.sizes if (match := _OBJECT.fullmatch(name)) and int(match[1]) <= last and name not in needed
        ]
        return [*lists, *objects]


def look(place: StorePlace) -> Contents:
    """List a store and read the newest whole list. Raises StoreError."""
    sizes = place.find()
    for name in sorted((name for name in sizes if _LIST.fullmatch(name)), reverse=True):
        listed = read_object(place / name)
        snapshot = None if listed is None else Snapshot.read(listed)
        if snapshot is not None:
            return Contents(sizes, snapshot)
        logger.warning("%s is no whole list of files; an earlier one is used", place / name)
    return Contents(sizes, None)


def read_object(place: StorePlace) -> bytes | None:
    """Return the content of an object; None where there is none. Raises StoreError."""
    try:
        return place.call(lambda: bytes(place.files.cat_file(place.path)))
    except FileNotFoundError:
        return None


def put_bytes(place: StorePlace, content: bytes) -> None:
    """Write an object, and look at its size. Raises StoreError."""

    def put() -> None:
        place.files.pipe_file(place.path, content)
        _check_size(place, len(content))

    _put(place, put)


def put_file(place: StorePlace, local: Path, size: int) -> None:
    """Copy a file that has `size` bytes and does not change into an object, and look at the object's size. Raises StoreError."""

    def put() -> None:
        place.files.put_file(str(local), place.path)
        _check_size(place, size)

    _put(place, put)


def _put(place: StorePlace, put: Any) -> None:
    def put_into_folder() -> None:
        if place.protocols & _WITH_FOLDERS:
            place.files.makedirs(place.path.rpartition("/")[0], exist_ok=True)
        put()

    try:
        place.call(put_into_folder, doing="write")
    except FileNotFoundError as error:
        raise StoreError(
            f"the store cannot write {place}: there is no {error}", remedy="Make the bucket, or correct the address"
        ) from error


def _check_size(place: StorePlace, size: int) -> None:
    place.files.invalidate_cache()
    found = place.files.info(place.path)["size"]
    if found != size:
        raise OSError(f"it holds {found} bytes of {size}")


def get_file(place: StorePlace, stored: StoredObject, local: Path) -> None:
    """Copy an object into a file and compare its sum. Raises FileNotFoundError and StoreError."""
    source = place / stored.key

    def get() -> None:
        source.files.get_file(source.path, str(local))
        with local.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:
                raise OSError("its content differs from what was written")

    local.parent.mkdir(parents=True, exist_ok=True)
    source.call(get)


def delete(place: StorePlace) -> None:
    """Delete an object, which may be gone already. Raises StoreError."""
    try:
        place.call(lambda: place.files.rm_file(place.path), doing="delete")
    except FileNotFoundError:
        return
