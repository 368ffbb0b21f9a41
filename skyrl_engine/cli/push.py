"""`skyrl-engine push`: the model of a run, to a repository of the hub."""

from pathlib import Path

import click

from skyrl_engine.cli.command import EngineCommand
from skyrl_engine.cli.terminal import echo


@click.command(cls=EngineCommand)
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.argument("repository", metavar="REPOSITORY")
@click.option(
    "--model", type=click.Path(path_type=Path), metavar="FOLDER", help="An export of the run; without it, the run's own model."
)
@click.option("--public", is_flag=True, help="Let everybody see the new repository; without it, it is private.")
@click.option("--update", is_flag=True, help="Write a commit onto a repository that exists.")
def push(run: Path, repository: str, model: Path | None, *, public: bool, update: bool) -> None:
    """Push the model of the run directory RUN to REPOSITORY (NAMESPACE/NAME) on the Hugging Face hub, with a model card.

    The environment variable HF_TOKEN holds a token that may write. Everything goes in one commit.
    """
    from skyrl_engine.training.push import find_model_to_push, push_model

    found = find_model_to_push(run, model)
    echo(f"pushing {len(found.files)} files, {found.size / 1e6:,.1f} MB, to {repository}", err=True)
    echo(f"model: {push_model(found, repository, public=public, update=update)}")
