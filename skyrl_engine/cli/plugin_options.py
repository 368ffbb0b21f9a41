"""Options of one plugin on a command line, as `--set KEY=VALUE`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from skyrl_engine.errors import ConfigError, Problem

if TYPE_CHECKING:
    from skyrl_engine.config import SelectedPlugin
    from skyrl_engine.registry.record import PluginRecord


def parsed_options(texts: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of the plugin as a table. Raises ConfigError with every text that is no option."""
    from skyrl_engine.config.reading.overrides import parse_override

    table: dict[str, Any] = {}
    parsed = [parse_override(text) for text in texts]
    problems = [each for each in parsed if isinstance(each, Problem)]
    if problems:
        raise ConfigError(problems)
    for each in parsed:
        assert not isinstance(each, Problem), "problems were raised above"
        path, value = each
        *parents, key = map(str, path)
        place = table
        for name in parents:
            place = place.setdefault(name, {})
        place[key] = value
    return table


def selected_plugin(record: "PluginRecord", options: Mapping[str, Any]) -> "SelectedPlugin":
    """Choose a plugin with these options. Raises ConfigError, which tells how to give what is missing, or PluginError."""
    from skyrl_engine.config import SelectedPlugin

    try:
        return SelectedPlugin.of(record, options, "command line")
    except ConfigError as error:
        raise ConfigError([_by_option(each, record.kind) for each in error.problems]) from error


def _by_option(problem: Problem, kind: str) -> Problem:
    """Name the option where a remedy names the key of a configuration."""
    place, _, key = problem.where.rpartition(": ")
    if not key.startswith(f"{kind}.") or "=... on the command line" not in problem.remedy:
        return problem
    name = key.removeprefix(f"{kind}.")
    return attrs.evolve(problem, where=f"{place}: {name}", remedy=f"Give --set {name}=VALUE")
