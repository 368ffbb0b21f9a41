"""`skyrl-engine config show|check|migrate|schema`."""

import json
from pathlib import Path
from typing import Any

import click

from skyrl_engine.cli.command import EngineGroup
from skyrl_engine.cli.options import file_argument, flags_of, load_config, overrides_argument, plugin_options, trust_option
from skyrl_engine.cli.terminal import echo, echo_json
from skyrl_engine.visible import visible


@click.group(cls=EngineGroup)
def config() -> None:
    """Show, check and describe configurations."""


@config.command("show")
@file_argument(required=False)
@overrides_argument
@plugin_options()
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object of key to value and origin.")
def show_config(file: Path | None, overrides: tuple[str, ...], *, trust_code: bool, as_json: bool, **choices: Any) -> None:
    """Print every key of the resolved configuration, plugin options and defaults included, and where its value comes from."""
    from skyrl_engine.config import resolve
    from skyrl_engine.config.reading.origins import DEFAULT, format_key, leaves

    resolved = resolve(load_config(file, overrides, flags_of(choices), trust_code=trust_code), need=())
    keys = {format_key(path): value for path, value in leaves(resolved.as_dict()) if path}
    origins = {key: str(resolved.origins.get(key, DEFAULT)) for key in keys}
    if as_json:
        echo_json({key: {"value": value, "origin": origins[key]} for key, value in keys.items()})
        return
    from skyrl_engine.cli.render import show_table

    show_table(("key", "value", "from"), [(key, _format_value(value), origins[key]) for key, value in keys.items()])


@config.command("check")
@file_argument(required=True)
@overrides_argument
@plugin_options()
@trust_option
def check_config(file: Path, overrides: tuple[str, ...], *, trust_code: bool, **choices: Any) -> None:
    """Check a configuration and the plugins it names; print every mistake at once."""
    from skyrl_engine.config import resolve

    resolve(load_config(file, overrides, flags_of(choices), trust_code=trust_code))
    echo(f"{file}: no mistakes. `skyrl-engine run --dry-run` looks at the model and the data too.")


@config.command("migrate")
@click.argument("theirs", type=click.Path(path_type=Path), metavar="FILE")
@click.argument("output", type=click.Path(path_type=Path), required=False, metavar="[OUTPUT]")
@click.option(
    "--trainer", type=click.Choice(["sft", "preference", "reward_model", "rl"]), help="What FILE trains by, where it does not say."
)
def migrate_config(theirs: Path, output: Path | None, trainer: str | None) -> None:
    """Write the YAML configuration FILE of TRL, axolotl, LLaMA-Factory or verl as one of this engine.

    Without OUTPUT it is printed. Every key is taken over, with the line that it comes from, or stands in a comment that says why not.
    """
    from skyrl_engine.config.migration import migrate
    from skyrl_engine.config.reading.sources import read_file

    if output is not None and output.exists():
        raise click.UsageError(f"{output} is there already. Name another file, or remove it.")
    migration = migrate(*read_file(theirs), str(theirs), trainer)
    text = migration.to_toml(theirs.name)
    if output is None:
        echo(text.rstrip("\n"))
    else:
        output.write_text(visible(text), encoding="utf-8")
        echo(f"{output}: check it with `skyrl-engine config check {output}`.")
    needless = sum(each.needless for each in migration.said)
    counts = (
        f"{len(migration.taken)} keys are written; {len(migration.said) - needless} are yours to decide, {needless} need nothing"
    )
    echo(f"{counts}: comments at the end say why.", err=True)


@config.command("schema")
def schema() -> None:
    """Print the JSON schema of configuration files, for editors and for other programs."""
    from skyrl_engine.config import config_schema

    echo_json(config_schema())


def _format_value(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
