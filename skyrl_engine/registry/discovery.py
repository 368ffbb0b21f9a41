"""Find plugins by reading the metadata of installed distributions. Nothing is imported, and nothing unreadable stops the search."""

import re
from collections.abc import Iterator
from importlib import metadata

from attrs import frozen

from skyrl_engine.registry.installed import remember_while_unchanged
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.record import PluginRecord

ENGINE = "skyrl-engine"
ENTRY_POINTS = "entry_points.txt"
COMMAND_GROUP = "skyrl_engine.command"
"""Entry points of click commands. They are no kind of plugin: nothing but the command line sees them."""
TRAINER_GROUP = "skyrl_engine.trainer"
"""Entry points of trainers. They are no kind of plugin: a configuration chooses one of them by `trainer`."""
_GROUPS = {kind.group: kind.name for kind in KINDS.values()}

_PLAIN_RANGE = re.compile(r"[\w.-]+?((?:(?:[<>]=?|[=!]=)\d+(?:\.\d+)*(?:,(?!$)|$))+)", re.ASCII)
"""A requirement as pip writes it for plain lower and upper bounds, such as skyrl-engine<0.2,>=0.1."""


@frozen
class UnreadableDistribution:
    """An installed distribution whose metadata cannot be read; what it offers is unknown. `where` is its folder, or its name if known."""

    where: str
    cause: str

    @classmethod
    def of(cls, where: str, error: Exception) -> "UnreadableDistribution":
        return cls(where, f"{type(error).__name__}: {error}")

    def __str__(self) -> str:
        return f"the metadata of {self.where} cannot be read ({self.cause}), so its plugins are unknown"


@frozen
class Discovery:
    """Every plugin found, sorted by kind (as in KINDS), name and distribution; and distributions that could not be read."""

    records: tuple[PluginRecord, ...]
    unreadable: tuple[UnreadableDistribution, ...] = ()


def normalise(distribution: str) -> str:
    """Return a distribution's name in the form that PEP 503 compares."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@remember_while_unchanged
def discover() -> Discovery:
    """Read the metadata of every distribution on sys.path.

    Where several installations of one distribution are on sys.path (an editable one over a left-over wheel), the first is what Python
    imports and what counts; the others do not exist.
    """
    records: list[PluginRecord] = []
    unreadable: list[UnreadableDistribution] = []
    for name, distribution in _iterate_offering("skyrl_engine.", unreadable):
        try:
            records += _records(name, distribution)
        except Exception as error:  # noqa: BLE001 - one damaged installation, of whatever sort, must not hide all others
            unreadable.append(UnreadableDistribution.of(name, error))
    order = list(KINDS)
    records.sort(key=lambda record: (order.index(record.kind), record.name, record.reference))
    return Discovery(tuple(records), tuple(unreadable))


def discover_commands() -> tuple[PluginRecord, ...]:
    """Read which commands installed distributions add to `skyrl-engine`, sorted by name and distribution.

    A distribution whose metadata cannot be read offers none: its commands are missing from the list, and nothing else is.
    """
    return _discover_group(COMMAND_GROUP, "command")


def discover_trainers() -> tuple[PluginRecord, ...]:
    """Read which trainers installed distributions add, sorted by name and distribution; nothing is imported."""
    return _discover_group(TRAINER_GROUP, "trainer")


@remember_while_unchanged
def _discover_group(group: str, kind: str) -> tuple[PluginRecord, ...]:
    records: list[PluginRecord] = []
    unreadable: list[UnreadableDistribution] = []
    for name, distribution in _iterate_offering(group, unreadable):
        try:
            records += _records_of_group(name, distribution, group, kind)
        except Exception as error:  # noqa: BLE001 - as above
            unreadable.append(UnreadableDistribution.of(name, error))
    return tuple(sorted(records, key=lambda record: (record.name, record.reference)))


def _iterate_offering(text: str, unreadable: list[UnreadableDistribution]) -> Iterator[tuple[str, metadata.Distribution]]:
    """Yield name and metadata of every distribution whose entry points mention `text`; what cannot be read is added to `unreadable`."""
    seen: set[str] = set()
    for candidate in metadata.distributions():
        where = "a distribution"
        try:
            where = f"the distribution in {candidate.locate_file('')}"
            if text not in (candidate.read_text(ENTRY_POINTS) or ""):
                continue
            name = normalise(candidate.metadata["Name"])
            if name in seen:
                continue
            seen.add(name)
            where = name
            distribution = metadata.distribution(name)
        except Exception as error:  # noqa: BLE001 - one damaged installation, of whatever sort, must not hide all others
            unreadable.append(UnreadableDistribution.of(where, error))
            continue
        yield name, distribution


def _records_of_group(name: str, distribution: metadata.Distribution, group: str, kind: str) -> list[PluginRecord]:
    offered = [point for point in distribution.entry_points if point.group == group]
    version, requirement = distribution.version, engine_requirement(distribution)
    return [
        PluginRecord(kind, point.name, point.value, distribution=name, version=version, engine_requirement=requirement)
        for point in offered
    ]


def summary_of(record: PluginRecord) -> str:
    """Return the line by which the distribution of a record describes itself; empty where it has none or it cannot be read."""
    try:
        return str(metadata.distribution(str(record.distribution)).metadata["Summary"] or "")
    except Exception:  # noqa: BLE001 - a list of commands is shown whatever is damaged
        return ""


def _records(name: str, distribution: metadata.Distribution) -> list[PluginRecord]:
    offered = [point for point in distribution.entry_points if point.group in _GROUPS]
    if not offered:
        return []
    version, requirement = distribution.version, engine_requirement(distribution)
    if not version:
        raise ValueError("it states no version")
    targets = dict.fromkeys((_GROUPS[point.group], point.name, point.value) for point in offered)
    return [
        PluginRecord(kind, point, target, distribution=name, version=version, engine_requirement=requirement)
        for kind, point, target in targets
    ]


def engine_requirement(distribution: metadata.Distribution) -> str | None:
    """Return the range of engine versions that the distribution depends on, None when it states none or an unreadable one.

    An unreadable range is refused when the plugin is used; until then it may concern nobody.
    """
    for line in distribution.requires or ():
        if normalise(line).startswith(ENGINE):
            if plain := _PLAIN_RANGE.fullmatch(line):  # without packaging, whose import would be a third of `plugins list`
                bounds = plain[1]
                if normalise(line.removesuffix(bounds)) == ENGINE:
                    return ",".join(sorted(bounds.split(",")))
                continue
            from packaging.requirements import InvalidRequirement, Requirement

            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            if normalise(requirement.name) == ENGINE and "extra" not in str(requirement.marker or ""):
                return str(requirement.specifier) or None
    return None
