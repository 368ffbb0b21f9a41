"""Sources of a configuration: a file, `section.key=value` overrides, and options of a command. Read, merged, not yet checked.

Overrides and options replace what the file says; every value remembers where it came from.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import Factory, evolve, frozen

from skyrl_engine.config.reading.merging import MergedTable, Option
from skyrl_engine.config.reading.origins import KeyPath, Origin, format_key, leaves
from skyrl_engine.config.trust.consent import Consent
from skyrl_engine.errors import ConfigError, Problem
from skyrl_engine.registry.plugin_lock import PluginLock


@frozen
class RawConfig:
    """Plain nested values as they were written, and the origin of every key that holds one.

    `problems` are mistakes found so far that do not hinder reading the rest; `resolve` reports them together with its own.
    """

    table: Mapping[str, Any]
    origins: Mapping[str, Origin]
    path: Path | None = None
    problems: tuple[Problem, ...] = ()
    written: Mapping[str, Any] | None = None
    """The whole file as it was read, before overrides; None where there is no file."""
    of_run: bool = False
    """The file is known to be a run directory's own."""
    consent: Consent = Factory(Consent)
    """The caller's word on code that a run directory names."""
    lock: PluginLock | None = None
    """The plugins that the caller holds the configuration to."""

    @property
    def label(self) -> str:
        """The name of this configuration where no line can be named."""
        return str(self.path) if self.path is not None else "command line"


def load(
    source: Path | Mapping[str, Any] | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] = MappingProxyType({}),
    *,
    consent: Consent | None = None,
    part: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
) -> RawConfig:
    """Read `source`, then `overrides`, then `flags`: dotted keys with values, or an `Option` naming the option.

    `source` is a file (TOML or YAML), a mapping of tables, or None. A flag whose value is None was not given. `consent` is the caller's word on
    code that a run directory's file names; None: no word, and nobody to ask. `part` says that the file is a run directory's own, and returns
    the part of it that counts. Raises ConfigError when the file cannot be read at all.
    """
    try:
        raw = _read(source, part)
    except ConfigError as error:
        further = override(RawConfig({}, {}), overrides, flags).problems
        raise ConfigError([*error.problems, *further]) from error
    raw = evolve(raw, consent=Consent() if consent is None else consent)
    return override(raw, overrides, flags)


def read_recorded_config(
    manifest: Path, written: Mapping[str, Any], *, without: Collection[str] = (), consent: Consent
) -> RawConfig:
    """Return the configuration that the run.json `manifest` records, but for the keys `without`: one of a run directory, as its file is.

    `written` is that configuration as the run's file has it.
    """
    table = copy.deepcopy(dict(written))
    for key in without:
        name, _, last = key.partition(".")
        table.get(name, {}).pop(last, None)
    origins = {format_key(key): Origin("file", str(manifest), None, _folder_of(manifest)) for key, _ in leaves(table) if key}
    return RawConfig(table, origins, manifest, written=written, of_run=True, consent=consent)


def override(raw: RawConfig, overrides: Sequence[str] = (), flags: Mapping[str, Any] = MappingProxyType({})) -> RawConfig:
    """Return a configuration with `overrides` and `flags`, as for `load`, over what it says."""
    options = {
        key: flag if isinstance(flag, Option) else Option(option_name(key), flag) for key, flag in flags.items() if flag is not None
    }
    merging = MergedTable(copy.deepcopy(dict(raw.table)), dict(raw.origins))
    options_set = {key: option for key, option in options.items() if option.value is not None}
    problems = merging.merge(overrides, options_set, Path.cwd())
    return evolve(raw, table=merging.table, origins=merging.origins, problems=(*raw.problems, *problems))


def with_defaults(raw: RawConfig, defaults: Mapping[str, Any], label: str) -> RawConfig:
    """Return a configuration with those of `defaults`, by their dotted keys, that nobody gave; `label` is their origin."""
    table, origins = copy.deepcopy(dict(raw.table)), dict(raw.origins)
    for name, value in defaults.items():
        *around, key = name.split(".")
        place: Any = table
        for part in around:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        # where no table is, structuring says so
        if isinstance(place, dict) and key not in place:
            place[key] = copy.deepcopy(value)
            origins |= {format_key(leaf): Origin("default", label) for leaf, _ in leaves(value, (*around, key))}
    return evolve(raw, table=table, origins=origins)


def _read(source: Path | Mapping[str, Any] | None, part: Callable[[Mapping[str, Any]], dict[str, Any]] | None) -> RawConfig:
    lines: Mapping[KeyPath, int] = {}
    path = source if isinstance(source, Path) else None
    if isinstance(source, Path):
        table, lines = read_file(source)
    else:
        table = copy.deepcopy(dict(source or {}))
    written = None if path is None else copy.deepcopy(table)
    table = table if part is None else part(table)
    label, folder = "the given mapping" if path is None else str(path), _folder_of(path)
    origins = {format_key(key): Origin("file", label, _line(lines, key), folder) for key, _ in leaves(table) if key}
    return RawConfig(table, origins, path, written=written, of_run=part is not None)


def from_dict(table: Mapping[str, Any], source: str) -> RawConfig:
    """A configuration that was resolved before, for instance out of a `run.json`; `source` is what problems call it."""
    origin = Origin("file", source)
    return RawConfig(copy.deepcopy(dict(table)), {format_key(key): origin for key, _ in leaves(table) if key}, Path(source))


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


def _line(lines: Mapping[KeyPath, int], path: KeyPath) -> int | None:
    """Return the line of a key, or of the closest key around it (keys inside braces have no line of their own in TOML)."""
    return next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)


def _folder_of(path: Path | None) -> Path | None:
    return None if path is None else Path.cwd() / path.parent
