"""`skyrl-engine reward-model`: train a reward model without a configuration file; the one it makes is printed."""

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

_KEYS = {**DATASET_KEYS, "preset": "reward_model.preset"}


@click.command("reward-model", cls=EngineCommand, keys=_KEYS, trainer="reward_model")
@overrides_argument
@dataset_options("Preferences", "Samples of one optimizer step, over all ranks; a pair is two.")
@click.option("--preset", metavar="NAME", help="A published recipe: bradley_terry (the default), steps.")
@plugin_options("reward_model")
@click.option("--dry-run", is_flag=True, help="Plan the run, refuse what cannot work, train nothing.")
def reward_model(overrides: tuple[str, ...], dry_run: bool, columns: dict[str, str] | None, **options: Any) -> int:
    """Train MODEL to value answers, on pairs of a chosen and a rejected answer in DATA, or with --preset steps to value each step of an answer,
    on steps that DATA judges. It is exported as a sequence classifier.

    The configuration that the options make is printed, as TOML: `skyrl-engine reward-model ... > my.toml` keeps it for
    `skyrl-engine run my.toml`. All else goes to stderr.
    """
    raw = load_config(
        None,
        overrides,
        {"trainer": "reward_model", **values_by_key(_KEYS, options), **columns_by_key(columns), **flags_of(options)},
    )
    return print_and_run(raw, dry_run=dry_run)
