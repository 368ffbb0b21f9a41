"""`skyrl-engine init`: a few questions, or options, to a configuration file that runs."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from skyrl_engine.cli.command import EngineCommand
from skyrl_engine.cli.options import load_config
from skyrl_engine.cli.terminal import echo

_TRAINERS = ("sft", "preference", "reward_model", "rl")
_NEEDED = {"trainer": "--trainer", "model": "--model", "signal": "--reward (or --env)", "data": "--data"}


@click.command(cls=EngineCommand)
@click.argument("output", type=click.Path(path_type=Path), default=Path("run.toml"), metavar="[FILE]")
@click.option("--trainer", type=click.Choice(_TRAINERS), help="What to train by.")
@click.option("--model", metavar="MODEL", help="A Hugging Face directory or hub id.")
@click.option("--data", metavar="DATA", help="What to train on: a file, a folder or a hub id.")
@click.option("--reward", metavar="FUNCTION", help="Of trainer rl: a reward function, ./file.py:name, for the tasks of --data.")
@click.option("--env", metavar="ENVIRONMENT", help="Of trainer rl, instead: an environment with tasks and rewards.")
@click.option("--eval-fraction", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE", help="Share of the data to hold out.")
@click.option("--lora", type=click.IntRange(min=0), metavar="RANK", help="Train low-rank adapters of this rank; 0: all weights.")
def init(output: Path, **given: Any) -> None:
    """Write a commented configuration FILE (run.toml) that `skyrl-engine run` trains with.

    On a terminal it asks for what no option says. The file is checked before it is written; one that is there is never replaced.
    """
    from skyrl_engine.config import resolve
    from skyrl_engine.config.report import to_toml
    from skyrl_engine.config.starter import write_starter

    if output.suffix != ".toml":
        raise click.UsageError(f"{output} does not end in .toml.")
    if output.exists():
        raise click.UsageError(f"{output} is there already. Name another file, or remove it.")
    if not output.absolute().parent.is_dir():
        raise click.UsageError(f"There is no folder {output.parent}. Make it, or name another file.")
    answers = _ask(given)
    tables = _tables(answers, output.absolute().parent)
    try:
        output.write_text(to_toml({"trainer": answers["trainer"], **tables}), encoding="utf-8")
        resolved = resolve(load_config(output, ()))
        if answers["trainer"] == "rl" and (lengths := _fit_lengths(resolved.config)):
            tables["rl"] = lengths
            output.write_text(to_toml({"trainer": answers["trainer"], **tables}), encoding="utf-8")
            resolved = resolve(load_config(output, ()))
        output.write_text(write_starter(answers["trainer"], tables, resolved.as_dict()), encoding="utf-8")
    except BaseException:
        output.unlink(missing_ok=True)
        raise
    echo(f"{output}: look at the plan with `skyrl-engine run {output} --dry-run`, train with `skyrl-engine run {output}`.")


def _fit_lengths(config: Any) -> dict[str, int]:
    """Return a length of answers for a model on this disk that has fewer positions than the default makes use of; else nothing."""
    from skyrl_engine.model_facts.facts import ModelFacts
    from skyrl_engine.training.rl.checks import fit_lengths

    positions = ModelFacts(config.model).extended_length if Path(config.model.path).is_dir() else None
    if positions is None:
        return {}
    fitting = fit_lengths(1, config.rl.max_tokens, positions)["max_tokens"]
    return {} if fitting == config.rl.max_tokens else {"max_tokens": fitting}


def _ask(given: dict[str, Any]) -> dict[str, Any]:
    """Return all answers: those of options, and on a terminal those to five questions. Raises UsageError for what nobody says."""
    at_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    answers = dict(given)

    def ask(name: str, question: str, **more: Any) -> None:
        if answers.get(name) is None and at_terminal:
            answers[name] = click.prompt(question, err=True, **more)

    ask("trainer", "How to train", type=click.Choice(_TRAINERS), default="sft")
    ask("model", "Model: a directory or hub id")
    answers["signal"] = answers["reward"] or answers["env"]
    if answers["trainer"] != "rl" and answers["signal"]:
        raise click.UsageError("--reward and --env are for trainer rl. Give --trainer rl too.")
    if answers["reward"] and answers["env"]:
        raise click.UsageError("--reward and --env are two ways to say the reward. Give one of them.")
    if answers["trainer"] == "rl":
        ask("signal", "Reward: a function ./file.py:name, or an environment such as reasoning_gym:spell_backward")
        if answers["signal"] and not answers["env"]:
            answers["reward" if ".py:" in answers["signal"] else "env"] = answers["signal"]
    if answers["env"] is None or answers["trainer"] != "rl":
        ask("data", "Tasks: a file, a folder or a hub id" if answers["trainer"] == "rl" else "Data: a file, a folder or a hub id")
    elif answers["data"] or answers["eval_fraction"]:
        raise click.UsageError("An environment of --env has tasks of its own. Remove --data and --eval-fraction, or give --reward.")
    if answers["env"] is None:
        ask("eval_fraction", "Share of it to hold out", type=click.FloatRange(0, 1, max_open=True), default=0.0)
    ask("lora", "Rank of low-rank adapters; 0 trains all weights", type=click.IntRange(min=0), default=0)
    needed = ["trainer", "model", *(["signal"] if answers["trainer"] == "rl" else []), *([] if answers["env"] else ["data"])]
    if lacking := [_NEEDED[name] for name in needed if not answers[name]]:
        raise click.UsageError(f"Give {' and '.join(lacking)}: there is no terminal to ask at.")
    return answers


def _tables(answers: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tables of the file, with paths as seen from its folder."""
    from skyrl_engine.cli.rl import environment_table

    model: dict[str, Any] = {"path": _place(answers["model"], folder)}
    if answers["lora"]:
        model["lora"] = {"rank": answers["lora"]}
    held_out = {"eval_fraction": answers["eval_fraction"]} if answers["eval_fraction"] else {}
    if answers["trainer"] != "rl":
        return {"model": model, "data": {"train": _place(answers["data"], folder), **held_out}}
    if answers["env"]:
        return {"model": model, "environments": [environment_table(answers["env"])]}
    path, _, name = answers["reward"].rpartition(":")
    reward = f"{_place(path, folder)}:{name}"
    return {
        "model": model,
        "environments": [{"use": "function", "reward": reward, "data": _place(answers["data"], folder), **held_out}],
    }


def _place(text: str, folder: Path) -> str:
    """Return a path that is there as seen from the file's folder, as `./...`; any other text, such as a hub id, as it is."""
    path = Path(text).expanduser()
    if path.is_absolute() or not path.exists():
        return text
    relative = os.path.relpath(path.absolute(), folder)
    return relative if relative.startswith("..") else f"./{relative}"
