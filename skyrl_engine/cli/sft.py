"""`skyrl-engine sft`: fine-tune without a configuration file; the one it makes is printed."""

from typing import Any

import click

from skyrl_engine.cli.command import EngineCommand
from skyrl_engine.cli.options import flags_of, load_config, one_or_several, overrides_argument, plugin_options
from skyrl_engine.cli.run import start_printed

_KEYS = {
    "model": "model.path",
    "data": "data.train",
    "eval_data": "data.eval",
    "eval_fraction": "data.eval_fraction",
    "max_length": "data.max_length",
    "output": "run.directory",
    "seed": "run.seed",
    "launch": "run.launch",
    "ranks": "run.ranks",
    "steps": "training.steps",
    "epochs": "training.epochs",
    "batch_size": "training.batch_size",
    "micro_batch_rows": "training.micro_batch_rows",
    "learning_rate": "optimizer.learning_rate",
}


@click.command(cls=EngineCommand)
@overrides_argument
@click.option("--model", required=True, metavar="MODEL", help="A Hugging Face directory or hub id.")
@click.option(
    "--data",
    required=True,
    multiple=True,
    callback=one_or_several,
    metavar="DATA",
    help="What to train on: a file, a folder or a hub id. Give it again for more, read one after the other.",
)
@click.option("--eval-data", metavar="DATA", help="Held-out data.")
@click.option("--eval-fraction", type=float, metavar="SHARE", help="Share of the data to hold out instead.")
@click.option("--max-length", type=int, metavar="TOKENS", help="Longest sample.")
@click.option("--output", metavar="DIRECTORY", help="The run directory; without it, a new one under runs/.")
@click.option("--steps", type=int, metavar="STEPS", help="Optimizer steps.")
@click.option("--epochs", type=float, metavar="EPOCHS", help="Passes over the data instead of steps.")
@click.option("--batch-size", type=int, metavar="SAMPLES", help="Samples of one optimizer step, over all ranks.")
@click.option("--micro-batch-rows", type=int, metavar="ROWS", help="Rows a rank computes at once.")
@click.option("--learning-rate", type=float, metavar="RATE", help="Peak learning rate of AdamW.")
@click.option("--launch", metavar="HOW", help="inline (this process) or ray.")
@click.option("--ranks", type=int, metavar="RANKS", help="Processes that train together; more than one needs --launch ray.")
@click.option("--seed", type=int, metavar="SEED", help="Seed of every random number.")
@plugin_options("sft")
@click.option("--dry-run", is_flag=True, help="Plan the run, refuse what cannot work, train nothing.")
def sft(overrides: tuple[str, ...], dry_run: bool, **given: Any) -> int:
    """Fine-tune MODEL on DATA, as the configuration says that the options make.

    That configuration is printed, as TOML: `skyrl-engine sft ... > my.toml` keeps it for `skyrl-engine run my.toml`. All else goes to stderr.
    """
    from skyrl_engine.config import Option

    flags = {key: Option(f"--{name.replace('_', '-')}", given[name]) for name, key in _KEYS.items() if given[name] is not None}
    raw = load_config(None, overrides, {**flags, **flags_of(given)})
    return start_printed(raw, dry_run=dry_run)
