"""`skyrl-engine lock`, and what holds a run to a lock: the lock file beside a configuration, or a run.json."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from skyrl_engine.cli.command import EngineCommand
from skyrl_engine.cli.options import (
    consent_of,
    file_argument,
    flags_of,
    load_config,
    overrides_argument,
    plugin_options,
    trust_option,
)
from skyrl_engine.cli.terminal import echo

if TYPE_CHECKING:
    from skyrl_engine.config import RawConfig
    from skyrl_engine.registry.plugin_lock import PluginLock

FORMAT: Final = 1
SUFFIX: Final = ".lock"
_OF_ITS_RUN: Final = ("run.directory", "checkpoint.resume")
"""Keys of a recorded run that another run does not take over."""


@click.command(cls=EngineCommand)
@file_argument(required=True)
@overrides_argument
@plugin_options()
@trust_option
def lock(file: Path, overrides: tuple[str, ...], *, trust_code: bool, **choices: Any) -> None:
    """Write distribution, version and hash of the engine and of every plugin that CONFIG uses into a lock file beside it.

    `run CONFIG --locked` then refuses to train with any others. Local files of code that CONFIG names are locked by their hashes.
    """
    from skyrl_engine.config import resolve
    from skyrl_engine.config.report import to_toml
    from skyrl_engine.registry.run_directories import run_directory_around
    from skyrl_engine.run.durable import write_durably

    if (run := run_directory_around(file)) is not None:
        raise click.UsageError(f"{file} lies in the run directory {run}, whose run.json is a lock: use `run --from {run}`.")
    resolved = resolve(load_config(file, overrides, flags_of(choices), trust_code=trust_code))
    place = file.with_suffix(SUFFIX)
    made = resolved.lock_plugins(source=str(place), remedy="")
    table = {"format": FORMAT, **made.to_table(place.resolve().parent)}
    try:
        write_durably(
            place, f"# Written by `skyrl-engine lock`; `skyrl-engine run {file.name} --locked` holds to it.\n{to_toml(table)}"
        )
    except OSError as error:
        raise click.UsageError(f"{place} cannot be written ({error.strerror}). Make its folder writable.") from error
    for name, plugin in made.plugins.items():
        echo(f"{name}: {plugin}")
    count = len(made.files or ())
    files = f" and {count} local file{'' if count == 1 else 's'} of code" if count else ""
    echo(f"{place}: {len(made.plugins)} plugins{files}. `skyrl-engine run {file} --locked` holds to it.")


def hold_to_lock(raw: "RawConfig", file: Path) -> "RawConfig":
    """Return the configuration, held to the lock file beside `file`. Raises ConfigError where there is none, or one that cannot be read."""
    from skyrl_engine.errors import ConfigError, Problem
    from skyrl_engine.registry.plugin_lock import PluginLock

    place = file.with_suffix(SUFFIX)
    again = f"`skyrl-engine lock {file}`"
    try:
        table = tomllib.loads(place.read_text(encoding="utf-8"))
        if table.pop("format", None) != FORMAT:
            raise ConfigError([Problem(str(place), f"is no lock of format {FORMAT}", f"Write it anew with {again}")])
        remedy = f"Install what it names, or lock what is here with {again}"
        made = PluginLock.from_table(table, place.resolve().parent, source=str(place), remedy=remedy)
    except FileNotFoundError as error:
        raise ConfigError([Problem(str(place), "there is no lock file", f"Write it with {again}")]) from error
    except OSError as error:
        raise ConfigError([Problem(str(place), f"cannot be read: {error.strerror}", "Make the file readable")]) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError([Problem(str(place), f"cannot be read as a lock: {error}", f"Write it anew with {again}")]) from error
    return attrs.evolve(raw, lock=made)


def read_recorded_run(place: Path, overrides: Sequence[str], flags: Mapping[str, Any], *, trust_code: bool) -> "RawConfig":
    """Return the configuration that a run recorded, held to its plugins; `place` is its run.json, or its directory.

    Directory and resume of that run are left out. Raises EngineError for a file that is no run.json.
    """
    from skyrl_engine.config.reading.sources import override, read_recorded_config
    from skyrl_engine.config.report import to_toml
    from skyrl_engine.errors import EngineError
    from skyrl_engine.registry.run_directories import MANIFEST
    from skyrl_engine.run.manifest import read_manifest

    file = place / MANIFEST if place.is_dir() else place
    manifest = read_manifest(file)
    try:
        if manifest is None:
            raise ValueError("no manifest")
        made = _lock_of_manifest(file, manifest)
        written = tomllib.loads(to_toml(manifest["config"]))
        raw = read_recorded_config(file, written, without=_OF_ITS_RUN, consent=consent_of(trust_code=trust_code))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        cause = "there is no such file" if not file.exists() else "this file is missing parts of one, or is none"
        raise EngineError(f"{file} is not the run.json of a run: {cause}", remedy="Name the run.json of a run directory") from error
    return attrs.evolve(override(raw, overrides, flags), lock=made)


def _lock_of_manifest(file: Path, manifest: Mapping[str, Any]) -> "PluginLock":
    from skyrl_engine.config.locking import locked_observer
    from skyrl_engine.registry.plugin_lock import PluginLock

    plugins = {**manifest["plugins"], **{locked_observer(entry["name"]): entry for entry in manifest["observers"]}}
    seal = manifest.get("seal")
    table = {"engine": manifest["engine"], "plugins": plugins, "files": {} if seal is None else seal["files"]}
    made = PluginLock.from_table(
        table, file.resolve().parent, source=str(file), remedy="Install what it names, or train with CONFIG, a file of your own"
    )
    return made if seal is not None else attrs.evolve(made, files=None)
