"""Options of one plugin on a command line, as `key=value` or `--set KEY=VALUE`, and those that it takes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from skyrl_engine.errors import ConfigError, Problem

if TYPE_CHECKING:
    from skyrl_engine.config import SelectedPlugin
    from skyrl_engine.registry.loader import LoadedPlugin
    from skyrl_engine.registry.record import PluginRecord

OPTION_COLUMNS = ("option", "type", "default", "meaning")


def parse_options(texts: tuple[str, ...], named: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the options of the plugin as a table, with those that its name on the command line holds, `named`.

    Raises ConfigError with every text that is no option, or says otherwise than the name.
    """
    from skyrl_engine.config import Option, load

    raw = load(None, texts, {key: Option(f"the name, its {key}", value) for key, value in named.items()})
    if raw.problems:
        # an option of a plugin is in no section
        raise ConfigError(
            [attrs.evolve(problem, remedy=problem.remedy.replace("section.key=value", "key=value")) for problem in raw.problems]
        )
    return dict(raw.table)


def select_plugin(record: "PluginRecord", options: Mapping[str, Any]) -> "SelectedPlugin":
    """Choose a plugin with these options. Raises ConfigError, which tells how to give what is missing, or PluginError."""
    from skyrl_engine.config import SelectedPlugin

    try:
        return SelectedPlugin.of(record, options, "command line")
    except ConfigError as error:
        raise ConfigError([_by_option(problem, record.kind) for problem in error.problems]) from error


def _by_option(problem: Problem, kind: str) -> Problem:
    """Name the option where a remedy names the key of a configuration."""
    place, _, key = problem.where.rpartition(": ")
    if not key.startswith(f"{kind}.") or "=... on the command line" not in problem.remedy:
        return problem
    name = key.removeprefix(f"{kind}.")
    return attrs.evolve(problem, where=f"{place}: {name}", remedy=f"Give --set {name}=VALUE")


def option_rows(loaded: "LoadedPlugin") -> list[dict[str, str]]:
    """Return every key of the plugin's own table: name, type, default and meaning, in words."""
    if loaded.schema is None:
        return []
    from skyrl_engine.config.report import default_text, key_meanings
    from skyrl_engine.config.wording import describe_type

    meanings = key_meanings(loaded.schema)
    return [
        {
            "name": attribute.alias or attribute.name,
            "type": describe_type(attribute.type),
            "default": default_text(attribute),
            "meaning": " ".join(meanings.get(attribute.name, "").split()),
        }
        for attribute in attrs.fields(attrs.resolve_types(loaded.schema))
    ]
