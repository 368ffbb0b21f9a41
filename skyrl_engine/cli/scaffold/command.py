"""`skyrl-engine plugins new KIND NAME`."""

from pathlib import Path

import click

from skyrl_engine.cli.command import EngineCommand, suggest_or_list
from skyrl_engine.cli.terminal import echo


@click.command("new", cls=EngineCommand)
@click.argument("kind", metavar="KIND")
@click.argument("name", metavar="NAME")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where to write it; a new folder named after the distribution unless it is given.",
)
@click.option(
    "--distribution", metavar="NAME", help="Name of the distribution; NAME-KIND, or NAME where it ends in KIND, unless it is given."
)
@click.option("--author", metavar="NAME", help="Who wrote it, for its metadata and license.")
@click.option(
    "--license", "license_name", default="Apache-2.0", show_default=True, metavar="LICENSE", help="Apache-2.0, MIT or BSD-3-Clause."
)
def new_plugin(
    kind: str, name: str, directory: Path | None, distribution: str | None, author: str | None, license_name: str
) -> None:
    """Write a distribution with one working plugin: code, options, tests, README. For instance `loss my-loss`.

    It can be installed, listed, verified and used as it is; then change its formula into yours.
    """
    from skyrl_engine.cli.scaffold.distribution import LICENSES, Details, write_distribution
    from skyrl_engine.cli.scaffold.examples import scaffold_of
    from skyrl_engine.cli.scaffold.names import names_for, refuse_taken
    from skyrl_engine.registry.kinds import KINDS

    if kind == "reward":
        raise click.UsageError(
            "A reward is a plugin of the kind environment. Decorate a function with skyrl_engine.reward, or use `plugins new environment`."
        )
    if kind not in KINDS:
        raise click.UsageError(f"There is no kind {kind!r}. {suggest_or_list(kind, KINDS, 'kinds')}")
    if license_name not in LICENSES:
        raise click.UsageError(
            f"There is no text for the license {license_name!r}. {suggest_or_list(license_name, LICENSES, 'licenses')}"
        )
    scaffold_of(KINDS[kind])
    names = names_for(kind, name, distribution)
    refuse_taken(names)
    target = directory if directory is not None else Path(names.distribution)
    files = write_distribution(names, Details(author or f"The {names.distribution} developers", license_name), target)
    for file in files:
        echo(target / file)
    echo(
        f'\nNext: python -m pip install --editable "{target}[test]" && python -m pytest {target}\n'
        f"Then change src/{names.package}/plugin.py into what you want."
    )
