"""Facts that a wheel states of itself, read from the file: nothing is unpacked, imported or run."""

import hashlib
import platform
import re
from importlib.metadata import PathDistribution
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Final
from zipfile import BadZipFile, ZipFile
from zipfile import Path as ZipPath

from attrs import frozen
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from skyrl_engine.catalogue.plugin_index import LARGEST_WHEEL, WITHOUT_PROMISES, IndexedWheel
from skyrl_engine.errors import PluginIndexError
from skyrl_engine.registry.discovery import COMMAND_GROUP, ENGINE, TRAINER_GROUP, engine_requirement
from skyrl_engine.registry.kinds import KINDS

LARGEST_UNPACKED: Final = 4 * 2**30
"""Bytes of all files in a wheel."""
_LARGEST_METADATA: Final = 2**20
_MOST_FILES: Final = 100_000

_GROUPS: Final = {
    **{kind.group: kind.name for kind in KINDS.values()},
    **dict(zip((COMMAND_GROUP, TRAINER_GROUP), WITHOUT_PROMISES, strict=True)),
}


@frozen
class WheelFacts:
    """A wheel's normalised name, version, tags, hash and size, and what its metadata says.

    `requires_engine` and `requires_python` are ranges of versions, empty for any; `plugins` are (kind, name) of its entry points, commands and
    trainers among them; `extras` are the extras that it declares.
    """

    file: str
    name: str
    version: str
    tags: frozenset[Tag]
    sha256: str
    size: int
    requires_engine: str
    requires_python: str
    plugins: tuple[tuple[str, str], ...]
    extras: frozenset[str]
    summary: str
    license: str
    homepage: str

    @property
    def is_engine(self) -> bool:
        return self.name == ENGINE


def rank_tags(tags: frozenset[Tag]) -> int | None:
    """Return how well wheels with these tags fit this Python and this machine, 0 the best; None where they do not."""
    return next((rank for rank, tag in enumerate(sys_tags()) if tag in tags), None)


def find_misfit(wheel: IndexedWheel, engine: str) -> str | None:
    """Say why a wheel is not for this version of the engine, this Python or this machine, as a clause; None where it is."""
    if not SpecifierSet(wheel.requires_engine).contains(engine, prereleases=True):
        return f"is made for {ENGINE} {wheel.requires_engine}, and this is {engine}"
    if not SpecifierSet(wheel.requires_python).contains(platform.python_version(), prereleases=True):
        return f"is made for Python {wheel.requires_python}, and this is {platform.python_version()}"
    if rank_tags(parse_wheel_filename(wheel.file)[3]) is None:
        return f"is made for other machines than this one ({wheel.file})"
    return None


def read_wheel(path: Path) -> WheelFacts:
    """Read what a wheel says of itself.

    Raises PluginIndexError for a file that is none, for one whose name and metadata differ, for sizes that no wheel has, and for members whose
    names lead out of the folder that they are unpacked into.
    """
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise _refuse(path.name, f"is no name of a wheel: {error}") from error
    size = path.stat().st_size if path.is_file() else 0
    if not 0 < size <= LARGEST_WHEEL:
        raise _refuse(path.name, f"has {size} bytes, and {LARGEST_WHEEL} are the most")
    try:
        with path.open("rb") as file, ZipFile(file) as archive:
            distribution = _open_metadata(path.name, archive)
            stated = distribution.metadata
            if canonicalize_name(str(stated["Name"])) != name or Version(str(stated["Version"])) != version:
                raise _refuse(
                    path.name,
                    f"holds {_shorten(stated['Name'])[:60]} {_shorten(stated['Version'])[:60]}, which its name does not say",
                )
            requires_python = str(SpecifierSet(stated["Requires-Python"] or ""))
            requires_engine = str(SpecifierSet(engine_requirement(distribution) or _hidden_range(distribution)))
            plugins = dict.fromkeys(
                (_GROUPS[point.group], point.name) for point in distribution.entry_points if point.group in _GROUPS
            )
            return WheelFacts(
                file=path.name,
                name=name,
                version=str(version),
                tags=tags,
                sha256=_hash_open(file),
                size=size,
                requires_engine=requires_engine,
                requires_python=requires_python,
                plugins=tuple(sorted(plugins)),
                extras=frozenset(canonicalize_name(extra) for extra in stated.get_all("Provides-Extra") or ()),
                summary=_shorten(stated["Summary"]),
                license=_shorten(stated["License-Expression"] or stated["License"]),
                homepage=_find_homepage(distribution),
            )
    except (BadZipFile, OSError, ValueError, KeyError, EOFError, RuntimeError, NotImplementedError) as error:
        raise _refuse(path.name, f"cannot be read: {type(error).__name__}: {error}") from error


def _open_metadata(file: str, archive: ZipFile) -> PathDistribution:
    """Check sizes and names of all members, and return the distribution of the one `.dist-info` folder."""
    members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    if len(members) > _MOST_FILES or unpacked > LARGEST_UNPACKED:
        raise _refuse(file, f"unpacks to {len(members)} files of {unpacked} bytes, more than a wheel holds")
    for member in members:
        place = PurePosixPath(member.filename)
        if place.is_absolute() or ".." in place.parts or "\\" in member.filename or ":" in member.filename:
            raise _refuse(file, f"holds a file that would be written outside of its folder: {member.filename!r}")
    folders = {member.filename.partition("/")[0] for member in members if member.filename.partition("/")[0].endswith(".dist-info")}
    if len(folders) != 1:
        raise _refuse(file, f"has {len(folders)} folders of metadata, and a wheel has one")
    (folder,) = folders
    described = sum(member.file_size for member in members if member.filename in _metadata_files(folder))
    if described > _LARGEST_METADATA:
        raise _refuse(file, f"has {described} bytes of metadata, and {_LARGEST_METADATA} are the most")
    return PathDistribution(ZipPath(archive, f"{folder}/"))


def _metadata_files(folder: str) -> set[str]:
    return {f"{folder}/{name}" for name in ("METADATA", "entry_points.txt", "WHEEL")}


def _hidden_range(distribution: PathDistribution) -> str:
    """Return an empty range; raises ValueError where a requirement on the engine cannot be read, which discovery passes over."""
    for line in distribution.requires or ():
        try:
            Requirement(line)
        except InvalidRequirement as error:
            raise ValueError(f"the requirement {line!r} cannot be read") from error
    return ""


def _hash_open(file: BufferedReader) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def _find_homepage(distribution: PathDistribution) -> str:
    """Return the address of the project's page: `Home-page`, or the link of that name, or the first; empty where none is a web address."""
    labelled = [line.partition(",") for line in distribution.metadata.get_all("Project-URL") or ()]
    links = {label.strip().lower().replace("-", ""): address.strip() for label, _, address in labelled}
    chosen = [
        distribution.metadata["Home-page"],
        *(links.get(label) for label in ("homepage", "source", "repository")),
        *links.values(),
    ]
    return next((link for link in chosen if link and len(link) <= 500 and re.fullmatch(r"https?://[^\s<>\"'()]+", link)), "")


def _shorten(text: object) -> str:
    """Return a text on one line, of 200 characters at most."""
    line = " ".join(str(text or "").split())
    return line if len(line) <= 200 else f"{line[:199]}…"


def _refuse(file: str, cause: str) -> PluginIndexError:
    return PluginIndexError(f"{file} {cause}", remedy="Build the wheel again, or ask its author for another one")
