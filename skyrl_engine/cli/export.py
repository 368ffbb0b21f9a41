"""`skyrl-engine export`: a checkpoint as a Hugging Face directory."""

from pathlib import Path

import click

from skyrl_engine.cli.command import EngineCommand


@click.command(cls=EngineCommand)
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.argument("output", type=click.Path(path_type=Path), metavar="OUTPUT")
@click.option("--step", type=click.IntRange(min=0), metavar="STEP", help="The checkpoint's step; without it, the newest.")
def export(run: Path, output: Path, step: int | None) -> None:
    """Write a checkpoint of the run directory RUN as a Hugging Face model directory OUTPUT, with its tokenizer."""
    from skyrl_engine.training.export import export_checkpoint

    export_checkpoint(run, output, step)
    click.echo(f"model: {output}")
