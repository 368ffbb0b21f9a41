"""`skyrl-engine config show|check|schema`."""

import json
from pathlib import Path
from typing import Any

import click

from skyrl_engine.cli.command import EngineGroup
from skyrl_engine.cli.options import file_argument, flags_of, load_config, overrides_argument, plugin_options, trust_option
from skyrl_engine.cli.terminal import echo, echo_json


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


@config.command("schema")
def schema() -> None:
    """Print the JSON schema of configuration files, for editors and for other programs."""
    from skyrl_engine.config import config_schema

    echo_json(config_schema())


def _format_value(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
