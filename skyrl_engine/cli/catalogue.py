"""`skyrl-engine plugins search|install|index`: plugins of a catalogue that the caller names, and how one is made."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from skyrl_engine.cli.command import EngineCommand, current_settings
from skyrl_engine.cli.terminal import echo, echo_json
from skyrl_engine.errors import ConfigError, PluginError, Problem

if TYPE_CHECKING:
    from skyrl_engine.catalogue.plugin_index import IndexedDistribution, IndexedWheel

VARIABLE: Final = "SKYRL_ENGINE_INDEX"

_index_option = click.option(
    "--index",
    metavar="FILE|URL",
    envvar=VARIABLE,
    help=f"The index.json of a catalogue: a file, or an address by https; else that in {VARIABLE}.",
)


@click.command(cls=EngineCommand)
@click.argument("word", metavar="WORD")
@_index_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def search(word: str, index: str | None, *, as_json: bool) -> None:
    """List the plugins of a catalogue whose kind, name, distribution or summary has WORD in it. Nothing is installed or imported."""
    from skyrl_engine.catalogue.install import matches, open_index

    _, found = open_index(_require_index(index))
    matching = [distribution for distribution in found.distributions if matches(distribution, word)]
    if as_json:
        echo_json([_facts(distribution) for distribution in matching])
        return
    if not matching:
        echo(f"None of the {len(found.distributions)} distributions in {index} has {word!r} in its name, summary or plugins.")
        return
    from skyrl_engine.cli.render import show_table

    rows = [
        (
            distribution.name,
            wheel.version,
            wheel.requires_engine or "any",
            f"{wheel.standing} {wheel.date}",
            _offers(wheel),
            wheel.summary,
        )
        for distribution in matching
        for wheel in (distribution.newest,)
    ]
    show_table(("distribution", "version", "for skyrl-engine", "verified", "offers", "summary"), rows)


@click.command(cls=EngineCommand)
@click.argument("name", metavar="NAME[==VERSION]")
@_index_option
@click.option("--unverified", is_flag=True, help="Install it although it broke a promise, or was not verified, or in part.")
def install(name: str, index: str | None, *, unverified: bool) -> None:
    """Install a distribution of a catalogue: the very file that was verified, and from pip's own index what it requires.

    Refused before anything is installed: another file than the one that was verified, and one that is not for this engine.
    """
    from skyrl_engine.catalogue.install import choose_wheel, install_wheel, open_index

    place, found = open_index(_require_index(index))
    chosen = choose_wheel(found, name, unverified=unverified)
    wheel = chosen.wheel
    if wheel.standing != "verified":
        echo(f"{chosen} is {wheel.standing}: {'; '.join(wheel.list_reasons())}", err=True)
    install_wheel(place, chosen)
    echo(f"Installed {chosen}, sha256 {wheel.sha256}, {wheel.standing} on {wheel.date} with skyrl-engine {wheel.engine}.")
    echo("What it requires comes from pip's index and was not compared with anything.")
    for plugin in wheel.plugins:
        echo(f"It offers the {plugin.kind} {plugin.name}: `skyrl-engine plugins show {plugin.reference}`.")
    echo(
        "Once a configuration uses it, `skyrl-engine lock CONFIG` writes it down, and `skyrl-engine run CONFIG --locked` holds to it."
    )


@click.command("index", cls=EngineCommand)
@click.argument("folder", metavar="DIR_OF_WHEELS", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of the catalogue; else that of the wheels.",
)
@click.option("--again", is_flag=True, help="Try wheels again that were tried before, too.")
@click.option("--list-only", is_flag=True, help="Run nothing: list wheels that were not tried before as unchecked.")
@click.option(
    "--options",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="TOML with the options that plugins are verified with, in [options], and extras to install, in [extras].",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1.0),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="The longest that the promises of one plugin may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the index as JSON.")
def make_index(
    folder: Path, output: Path | None, options: Path | None, time_limit: float, *, again: bool, list_only: bool, as_json: bool
) -> int:
    """Make a catalogue: install each wheel into an environment of its own, verify its plugins, write index, badges and pages.

    CODE OF EVERY WHEEL IS RUN, without a sandbox, unless --list-only. The exit code is 3 where a wheel is broken or cannot be read.
    """
    from skyrl_engine.catalogue.make import make_catalogue
    from skyrl_engine.catalogue.plugin_index import INDEX_NAME
    from skyrl_engine.catalogue.trial import TrialSettings

    if again and list_only:
        raise click.UsageError("--again tries every wheel, and --list-only none. Leave one of them out.")
    if not any(folder.glob("*.whl")):
        raise click.UsageError(f"{folder} has no wheels. Name a folder of *.whl files.")
    given = _read_options(options)
    settings = TrialSettings(
        folder.resolve(),
        options=given["options"],
        extras=given["extras"],
        folder=None if options is None else options.resolve().parent,
        time_limit=time_limit,
    )
    quiet = current_settings().quiet
    made = make_catalogue(
        settings, output or folder, again=again, list_only=list_only, tell=lambda line: None if quiet else echo(line, err=True)
    )
    for error in made.refused:
        echo(f"{error.summary}.", err=True)
    wheels = [wheel for distribution in made.index.distributions for wheel in distribution.wheels]
    if as_json:
        import attrs

        echo_json(attrs.asdict(made.index))
    else:
        counts = {
            standing: sum(wheel.standing == standing for wheel in wheels)
            for standing in sorted({wheel.standing for wheel in wheels})
        }
        told = ", ".join(f"{count} {standing}" for standing, count in counts.items()) or "no wheel"
        refused = f", {len(made.refused)} unreadable" if made.refused else ""
        echo(f"{(output or folder) / INDEX_NAME}: {told}{refused}.")
    return PluginError.exit_code if made.refused or any(wheel.standing == "broken" for wheel in wheels) else 0


def _require_index(index: str | None) -> str:
    if not index:
        raise click.UsageError(
            f"There is no index of plugins until you name one: --index FILE|URL, or the environment variable {VARIABLE}."
        )
    return index


def _read_options(file: Path | None) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return the tables `options` and `extras` of a file, each of lists of texts. Raises ConfigError for any other content."""
    tables: dict[str, Any] = {"options": {}, "extras": {}}
    if file is None:
        return tables
    remedy = 'Write [options] with "kind:name" = ["key=value"], and [extras] with distribution = ["extra"]'
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError([Problem(str(file), f"cannot be read: {error}", remedy)]) from error
    for name, table in read.items():
        entries = table.values() if isinstance(table, dict) else [None]
        lists = all(isinstance(entry, list) and all(isinstance(text, str) for text in entry) for entry in entries)
        if name not in tables or not lists:
            raise ConfigError([Problem(str(file), f"{name} is no table of lists of texts that is known", remedy)])
        tables[name] = table
    return tables


def _offers(wheel: "IndexedWheel") -> str:
    return ", ".join(plugin.reference for plugin in wheel.plugins)


def _facts(distribution: "IndexedDistribution") -> dict[str, Any]:
    import attrs

    return {
        "name": distribution.name,
        "wheels": [{**attrs.asdict(wheel), "standing": wheel.standing} for wheel in distribution.wheels],
    }
