"""`skyrl-engine export`: a checkpoint as a Hugging Face directory."""

from pathlib import Path
from typing import Any

import click

from skyrl_engine.cli.command import EngineCommand
from skyrl_engine.cli.terminal import echo


@click.command(cls=EngineCommand)
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.argument("output", type=click.Path(path_type=Path), metavar="OUTPUT")
@click.option("--step", type=click.IntRange(min=0), metavar="STEP", help="The checkpoint's step; without it, the newest.")
@click.option("--best", is_flag=True, help="The best checkpoint, of runs with evaluation.best.")
@click.option("--merge", is_flag=True, help="Write adapters merged into the base model, as one whole model.")
@click.option("--ema", is_flag=True, help="The average of the weights, of runs with optimizer.ema_decay.")
@click.option("--model", metavar="MODEL", help="Where the base model is, if not where the run found it: a directory or hub id.")
@click.option(
    "--precision",
    type=click.Choice(["float64", "float32", "bfloat16"]),
    help="Precision of the written weights; without it, that of the run (model.dtype).",
)
@click.option("--backend", metavar="REFERENCE", help="The backend that made the checkpoint, where it is in a local file.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that came with the model. Only for code you have read.")
def export(run: Path, output: Path, step: int | None, *, best: bool, **choices: Any) -> None:
    """Write a checkpoint of the run directory RUN as a Hugging Face model directory OUTPUT, with its tokenizer.

    Neither the base model nor the folder where the run was made is needed, but to merge adapters. No code of the checkpoint is run.
    """
    from skyrl_engine.training.export import ExportChoices, export_checkpoint

    if best and step is not None:
        raise click.UsageError("--best and --step name a checkpoint each: give one of them")
    checkpoint = export_checkpoint(run, output, "best" if best else step, ExportChoices(**choices))
    echo(f"model: {output}" + (f" (step {checkpoint.step})" if best else ""))
