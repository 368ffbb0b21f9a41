"""`skyrl-engine preference`: train on preferences without a configuration file; the one it makes is printed."""

from typing import Any

import click

from skyrl_engine.cli.command import EngineCommand
from skyrl_engine.cli.options import (
    DATASET_KEYS,
    columns_by_key,
    dataset_options,
    flags_of,
    load_config,
    overrides_argument,
    plugin_options,
    values_by_key,
)
from skyrl_engine.cli.run import print_and_run

_KEYS = {**DATASET_KEYS, "preset": "preference.preset", "reference": "reference.path"}


@click.command(cls=EngineCommand, keys=_KEYS, trainer="preference")
@overrides_argument
@dataset_options(
    "Preferences",
    "Samples of one optimizer step, over all ranks; a pair is two.",
    click.option("--preset", metavar="NAME", help="A published recipe: dpo (the default), ipo, simpo, cpo, orpo, kto."),
    click.option("--reference", metavar="MODEL", help="The model to compare with; without it, MODEL as it was before training."),
)
@plugin_options("preference")
@click.option("--dry-run", is_flag=True, help="Plan the run, refuse what cannot work, train nothing.")
def preference(overrides: tuple[str, ...], dry_run: bool, columns: dict[str, str] | None, **options: Any) -> int:
    """Train MODEL on the preferences in DATA: pairs of a chosen and a rejected answer, or single answers with a label.

    The configuration that the options make is printed, as TOML: `skyrl-engine preference ... > my.toml` keeps it for
    `skyrl-engine run my.toml`. All else goes to stderr.
    """
    raw = load_config(
        None, overrides, {"trainer": "preference", **values_by_key(_KEYS, options), **columns_by_key(columns), **flags_of(options)}
    )
    return print_and_run(raw, dry_run=dry_run)
