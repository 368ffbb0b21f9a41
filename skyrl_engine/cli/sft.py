"""`skyrl-engine sft`: fine-tune without a configuration file; the one it makes is printed."""

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


@click.command(cls=EngineCommand, keys=DATASET_KEYS, trainer="sft")
@overrides_argument
@dataset_options("What to train on", "Samples of one optimizer step, over all ranks.")
@plugin_options("sft")
@click.option("--dry-run", is_flag=True, help="Plan the run, refuse what cannot work, train nothing.")
def sft(overrides: tuple[str, ...], dry_run: bool, columns: dict[str, str] | None, **options: Any) -> int:
    """Fine-tune MODEL on DATA, as the configuration says that the options make.

    That configuration is printed, as TOML: `skyrl-engine sft ... > my.toml` keeps it for `skyrl-engine run my.toml`. All else goes to stderr.
    """
    raw = load_config(None, overrides, {**values_by_key(DATASET_KEYS, options), **columns_by_key(columns), **flags_of(options)})
    return print_and_run(raw, dry_run=dry_run)
