"""The index of a catalogue, `index.json`: distributions, their wheels by version and hash, and what `plugins verify` said of their plugins."""

import json
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Final, Literal

import attrs
from attrs import field, frozen
from attrs.validators import deep_iterable, ge, in_, le, matches_re, max_len
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from skyrl_engine.config.converter import refusals, strict_converter
from skyrl_engine.config.reading.origins import format_key
from skyrl_engine.errors import PluginIndexError
from skyrl_engine.registry.kinds import KINDS

FORMAT: Final = 1
INDEX_NAME: Final = "index.json"

WITHOUT_PROMISES: Final = ("command", "trainer")
"""Sorts of entry points that a catalogue names and that the kit has no promises for."""

LARGEST_WHEEL: Final = 2**30
"""Bytes of a wheel that is read or downloaded."""
_LONGEST: Final = 500
"""Characters of a text."""

NOT_TRIED: Final = "it was not tried"
"""The reason of plugins that were only listed."""

Standing = Literal["verified", "partly verified", "not verified", "broken"]


def _is_wheel_name(_: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    if value != PurePath(value).name or not re.fullmatch(r"[\w.+!-]+\.whl", value, re.ASCII):
        raise ValueError(f"{attribute.name} must be the plain name of a wheel, is {value!r}")
    try:
        parse_wheel_filename(value)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise ValueError(f"{attribute.name} is no name of a wheel: {error}") from error


def _is_version(_: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    try:
        Version(value)
    except InvalidVersion as error:
        raise ValueError(f"{attribute.name} is no version: {value!r}") from error


def _is_range(_: object, attribute: "attrs.Attribute[str]", value: str) -> None:
    try:
        SpecifierSet(value)
    except InvalidSpecifier as error:
        raise ValueError(f"{attribute.name} is no range of versions: {value!r}") from error


_TEXT: Any = max_len(_LONGEST)
_NAME = matches_re(r"[a-z0-9]([a-z0-9-]{0,98}[a-z0-9])?")


@frozen
class IndexedPlugin:
    """One entry of a wheel, and what the kit said of it.

    `kept` counts promises that are kept, `broken` names others; `reason` is a sentence where the plugin is broken or was not checked, and
    `options` are the key=value that it was verified with.
    """

    kind: str = field(validator=in_((*KINDS, *WITHOUT_PROMISES)))
    name: str = field(validator=[_TEXT, matches_re(r"[^\s:]+")])
    status: Literal["kept", "broken", "unchecked"]
    kept: int = field(default=0, validator=[ge(0), le(10_000)])
    broken: tuple[str, ...] = field(default=(), validator=[max_len(200), deep_iterable(_TEXT)])
    reason: str = field(default="", validator=_TEXT)
    options: tuple[str, ...] = field(default=(), validator=[max_len(100), deep_iterable(_TEXT)])

    @property
    def reference(self) -> str:
        """Return "kind:name"."""
        return f"{self.kind}:{self.name}"


@frozen
class IndexedWheel:
    """One wheel: what its metadata says, and how it was verified, with which engine and Python, on which day.

    `problem` says why nothing of it could be verified, such as an installation that failed; None where it could.
    """

    version: str = field(validator=[_TEXT, _is_version])
    file: str = field(validator=[_TEXT, _is_wheel_name])
    sha256: str = field(validator=matches_re(r"[0-9a-f]{64}"))
    size: int = field(validator=[ge(1), le(LARGEST_WHEEL)])
    engine: str = field(validator=[_TEXT, _is_version])
    python: str = field(validator=[_TEXT, _is_version])
    date: str = field(validator=matches_re(r"\d{4}-[01]\d-[0-3]\d"))
    plugins: tuple[IndexedPlugin, ...] = field(validator=max_len(1000))
    requires_engine: str = field(default="", validator=[_TEXT, _is_range])
    requires_python: str = field(default="", validator=[_TEXT, _is_range])
    summary: str = field(default="", validator=_TEXT)
    license: str = field(default="", validator=_TEXT)
    homepage: str = field(default="", validator=[_TEXT, matches_re(r"(https?://[^\s<>\"'()]+)?")])
    problem: str | None = field(default=None, validator=attrs.validators.optional(_TEXT))

    @property
    def standing(self) -> Standing:
        """Return the verdict on the wheel: "verified" where every plugin was checked and keeps what it promises."""
        statuses = {plugin.status for plugin in self.plugins}
        if self.problem is not None or "broken" in statuses:
            return "broken"
        if statuses == {"kept"}:
            return "verified"
        return "partly verified" if "kept" in statuses else "not verified"

    @property
    def is_tried(self) -> bool:
        """Return False where all plugins were only listed."""
        return any(plugin.reason != NOT_TRIED for plugin in self.plugins) or not self.plugins

    def list_reasons(self) -> Iterator[str]:
        """Yield what keeps the wheel from being verified, a clause each."""
        if self.problem is not None:
            yield self.problem
        for plugin in self.plugins:
            if plugin.status != "kept":
                yield f"{plugin.reference} is {plugin.status}{f': {plugin.reason}' if plugin.reason else ''}"
        if not self.plugins:
            yield "it offers no plugin"


@frozen
class IndexedDistribution:
    """A distribution by its normalised name (PEP 503), with its wheels, the newest first."""

    name: str = field(validator=_NAME)
    wheels: tuple[IndexedWheel, ...] = field(validator=[attrs.validators.min_len(1), max_len(1000)])

    def __attrs_post_init__(self) -> None:
        for wheel in self.wheels:
            name, version, *_ = parse_wheel_filename(wheel.file)
            if (name, version) != (self.name, Version(wheel.version)):
                raise ValueError(f"{wheel.file} is not named after {self.name} {wheel.version}")

    @property
    def newest(self) -> IndexedWheel:
        return self.wheels[0]


@frozen
class PluginIndex:
    """Everything in a catalogue, sorted by name."""

    distributions: tuple[IndexedDistribution, ...] = field(validator=max_len(100_000))
    format: int = field(default=FORMAT, validator=in_((FORMAT,)))

    def __attrs_post_init__(self) -> None:
        names = [distribution.name for distribution in self.distributions]
        if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
            raise ValueError(f"{twice[0]} stands in it twice")

    def find(self, name: str) -> IndexedDistribution | None:
        """Return the distribution of a normalised name; None where there is none."""
        return next((distribution for distribution in self.distributions if distribution.name == name), None)

    def to_json(self) -> str:
        """Return what `read_index` reads."""
        return json.dumps(attrs.asdict(self), indent=1) + "\n"


def read_index(text: bytes, source: str) -> PluginIndex:
    """Read an index that came from `source`. Raises PluginIndexError for anything that is none, with every mistake found."""
    remedy = "Name the index.json that `skyrl-engine plugins index` wrote"
    if text.lstrip()[:1] == b"<":
        raise PluginIndexError(f"{source} is a page of HTML and no index", remedy=remedy)
    try:
        table = json.loads(text, object_pairs_hook=_without_repeated_keys)
    except (ValueError, RecursionError) as error:
        raise PluginIndexError(f"{source} is no JSON: {error}", remedy=remedy) from error
    if not isinstance(table, dict) or "distributions" not in table or "format" not in table:
        raise PluginIndexError(f"{source} is JSON, and no index of plugins", remedy=remedy)
    if type(table["format"]) is not int or table["format"] != FORMAT:
        raise PluginIndexError(
            f"{source} is an index of format {table['format']!r}, and this engine reads format {FORMAT}",
            remedy="Use the engine that made it, or make it again with this one",
        )
    try:
        return strict_converter().structure(table, PluginIndex)
    except Exception as error:
        found = [f"{format_key(path) or 'the index'}: {refused}" for path, refused in refusals(error)]
        raise PluginIndexError(
            f"{source} is no index that can be trusted: {found[0]}", remedy="Make it again", details=found[1:10]
        ) from error


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("an object has a key twice")
    return table
