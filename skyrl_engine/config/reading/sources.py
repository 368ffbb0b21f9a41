"""Sources of a configuration: a file, `section.key=value` overrides, and options of a command. Read, merged, not yet checked.

Overrides replace what the file says, options replace both; every value remembers where it came from.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import frozen

from skyrl_engine.config.other_words import RL, meant_by_path
from skyrl_engine.config.reading.origins import KeyPath, Origin, dotted, leaves
from skyrl_engine.config.reading.overrides import parse_override
from skyrl_engine.errors import ConfigError, Problem


@frozen
class Option:
    """A command's option by the name a person typed, for instance `Option("--steps", 20)`."""

    name: str
    value: Any


@frozen
class RawConfig:
    """Plain nested values as they were written, and the origin of every key that holds one.

    `problems` are mistakes found so far that do not hinder reading the rest; `resolve` reports them together with its own.
    """

    table: Mapping[str, Any]
    origins: Mapping[str, Origin]
    path: Path | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def label(self) -> str:
        """The name of this configuration where no line can be named."""
        return str(self.path) if self.path is not None else "command line"


def load(
    source: Path | Mapping[str, Any] | None, overrides: Sequence[str] = (), flags: Mapping[str, Any] = MappingProxyType({})
) -> RawConfig:
    """Read `source`, then `overrides`, then `flags`: dotted keys with values, or an `Option` naming the option.

    `source` is a file (TOML or YAML), a mapping of tables, or None. A flag whose value is None was not given. Raises ConfigError when the file
    cannot be read at all.
    """
    merging = _Merging()
    folder = Path.cwd()
    path = source if isinstance(source, Path) else None
    lines: Mapping[KeyPath, int] = {}
    try:
        if isinstance(source, Path):
            table, lines = read_file(source)
        else:
            table = copy.deepcopy(dict(source or {}))
    except ConfigError as error:
        raise ConfigError([*error.problems, *_merge_command_line(_Merging(), overrides, flags, folder)]) from error
    label = "the given mapping" if path is None else str(path)
    for key, _ in leaves(table):
        if key:
            merging.origins[dotted(key)] = Origin("file", label, _line(lines, key), _folder_of(path))
    merging.table = table
    problems = _merge_command_line(merging, overrides, flags, folder)
    return RawConfig(merging.table, merging.origins, path, tuple(problems))


def from_dict(table: Mapping[str, Any], source: str) -> RawConfig:
    """A configuration that was resolved before, for instance out of a `run.json`; `source` is what problems call it."""
    origin = Origin("file", source)
    return RawConfig(copy.deepcopy(dict(table)), {dotted(key): origin for key, _ in leaves(table) if key}, Path(source))


def read_file(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return the plain table of a TOML or YAML file and the lines of its keys. Raises ConfigError."""
    label = str(path)
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError([Problem(label, "is neither TOML nor YAML by its name", "Give a file that ends in .toml, .yaml or .yml")])
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError([Problem(label, "there is no such file", "Check the path, or make one with `sft`")]) from error
    except OSError as error:
        raise ConfigError([Problem(label, f"cannot be read: {error.strerror}", "Check the path and its permissions")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(label, f"is not UTF-8 text (byte {error.start})", "Save the file as UTF-8")]) from error
    try:
        if path.suffix == ".toml":
            from skyrl_engine.config.reading.toml import read_toml

            return read_toml(text, label)
        from skyrl_engine.config.reading.yaml import read_yaml

        return read_yaml(text, label)
    except RecursionError as error:
        raise ConfigError([Problem(label, "is nested too deeply", "Flatten the lists and tables")]) from error


def option_name(key: str) -> str:
    """Return the option that sets a key, unless the caller names another: `loss.use` is --loss, `model.path` --model, `data.train` --data."""
    section, _, last = key.partition(".")
    return f"--{section}" if last in ("use", "path", "train") else f"--{last.replace('_', '-')}"


class _Merging:
    """A table while files, overrides and options are merged into it."""

    def __init__(self) -> None:
        self.table: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}

    def put(self, path: KeyPath, value: Any, origin: Origin) -> str | None:
        """Set one key, replacing what was there; returns the key that is in the way when a value stands where a table is needed."""
        table = self.table
        for depth, part in enumerate(path[:-1], start=1):
            inner = table.setdefault(str(part), {})
            if not isinstance(inner, dict):
                return dotted(path[:depth])
            table = inner
        table[str(path[-1])] = value
        name = dotted(path)
        for key in [key for key in self.origins if key == name or key.startswith((f"{name}.", f"{name}["))]:
            del self.origins[key]
        for inside, _ in leaves(value, path):
            self.origins[dotted(inside)] = origin
        return None


def _merge_command_line(merging: _Merging, overrides: Sequence[str], flags: Mapping[str, Any], folder: Path) -> list[Problem]:
    problems: list[Problem] = []
    given: dict[str, Any] = {}
    origin = Origin("command line", "command line", folder=folder)
    for text in overrides:
        parsed = parse_override(text)
        if isinstance(parsed, Problem):
            problems.append(parsed)
            continue
        path, value = parsed
        given[dotted(path)] = value
        problems += _put(merging, path, value, origin)
    for key, flag in flags.items():
        option = flag if isinstance(flag, Option) else Option(option_name(key), flag)
        if option.value is None:
            continue
        if key in given and given[key] != option.value:
            problems.append(Problem(f"{option.name}: {key}", f"{key}={given[key]} is given too", "Give one of the two"))
            continue
        problems += _put(merging, tuple(key.split(".")), option.value, Origin("option", option.name, folder=folder))
    return problems


def _put(merging: _Merging, path: KeyPath, value: Any, origin: Origin) -> list[Problem]:
    obstacle = merging.put(path, value, origin)
    if obstacle is None:
        return []
    remedy = meant_by_path(path, RL) if obstacle == "trainer" else None
    return [Problem(f"{origin}: {dotted(path)}", f"{obstacle} holds a value, not a table", remedy or f"Set {obstacle} as a whole")]


def _line(lines: Mapping[KeyPath, int], path: KeyPath) -> int | None:
    """Return the line of a key, or of the closest key around it (keys inside braces have no line of their own in TOML)."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)


def _folder_of(path: Path | None) -> Path | None:
    return None if path is None else Path.cwd() / path.parent
