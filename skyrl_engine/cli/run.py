"""`skyrl-engine run`: fine-tune as a configuration file says."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl_engine.cli.command import EngineCommand, Settings, settings_of
from skyrl_engine.cli.options import file_argument, flags_of, load_config, overrides_argument, plugin_options

if TYPE_CHECKING:
    from skyrl_engine.config import ResolvedConfig
    from skyrl_engine.training.sft import RunResult


@click.command(cls=EngineCommand)
@file_argument(required=True)
@overrides_argument
@plugin_options
@click.option("--dry-run", is_flag=True, help="Plan the run, refuse what cannot work, train nothing.")
@click.pass_context
def run(context: click.Context, /, file: Path, overrides: tuple[str, ...], dry_run: bool, **choices: Any) -> None:
    """Fine-tune as the configuration file CONFIG says; options and section.key=value go before the file."""
    from skyrl_engine.config import resolve

    resolved = resolve(load_config(file, overrides, flags_of(choices)))
    start(resolved, settings_of(context), dry_run=dry_run)


def start(resolved: "ResolvedConfig", settings: Settings, *, dry_run: bool) -> None:
    """Train, or only plan, and print the outcome."""
    if dry_run:
        from skyrl_engine.training.sft import plan_sft

        plan_sft(resolved)
        return
    from skyrl_engine.cli.training import train

    report_result(train(resolved, settings))


def report_result(result: "RunResult") -> None:
    for name, value in result.metrics.items():
        click.echo(f"{name}: {value:.6g}")
    click.echo(f"run directory: {result.directory}")
