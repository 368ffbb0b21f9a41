"""`skyrl-engine demo`: make a model and data, fine-tune as `run` does, and show what changed on questions held out from training."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from skyrl_engine import ConfigError
from skyrl_engine.cli.command import CommandSettings, EngineCommand, current_settings
from skyrl_engine.cli.terminal import echo
from skyrl_engine.contracts import EvaluationFinished
from skyrl_engine.errors import Problem
from skyrl_engine.hooks.markers import hookimpl
from skyrl_engine.visible import visible_line

if TYPE_CHECKING:
    from skyrl_engine.cli.demo.recipe import DemoRecipe, Examination, Preparation
    from skyrl_engine.run.directory import RunDirectory
    from skyrl_engine.training.loop import RunResult

CONFIG_FILE = "demo.toml"
LOSS_FILE = "my_loss.py"
LAST = "demo"
"""Name in `runs/` of a link to the last demo."""
_EXAMPLES = 5
_LOSS = '''\
"""A loss of your own: change it and run it, there is nothing to install."""

from attrs import define

from skyrl_engine import loss


@define
class FocalConfig:
    gamma: float = 2.0


@loss(needs=("logprobs",), config=FocalConfig)
def my_loss(tokens, config):
    """Focal cross-entropy (Lin et al. 2017, eq. 4), float32[n]: tokens the model is already sure of count less."""
    miss = 1 - tokens.logprobs.exp()
    return -(miss**config.gamma) * tokens.logprobs
'''


class HeldOutLoss:
    """An observer that keeps the loss of every evaluation: (step, loss)."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []

    @hookimpl
    def skyrl_engine_evaluation_finished(self, event: EvaluationFinished) -> None:
        self.losses.append((event.step, event.metrics["loss"]))


@click.command(cls=EngineCommand)
@click.option(
    "--model",
    type=click.Choice(["tiny", "smollm2"]),
    default="tiny",
    show_default=True,
    help="tiny: a small model made here learns a reasoning-gym task, from answers and then from a reward. "
    "smollm2: the pretrained SmolLM2-135M-Instruct learns from a corpus.",
)
@click.option("--only", type=click.Choice(["sft"]), help="sft: supervised fine-tuning alone, without the reward.")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIRECTORY", help="A new directory; without it, one under runs/."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Optimizer steps of each training, instead of as many as the demo needs to show something.",
)
def demo(model: str, only: str | None, output: Path | None, steps: int | None) -> int:
    """Train a small model offline, on this computer's CPU, and see what it learned: from answers, then from a reward.

    It goes the same way as `skyrl-engine run` with configuration files, which stay in the directory for you to change.
    """
    if model == "tiny":
        # on matrices this small, threads that wait for each other cost more than they bring, many times so on a busy machine
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from skyrl_engine.cli import render
    from skyrl_engine.cli.demo import second_act
    from skyrl_engine.cli.demo.choice import recipe
    from skyrl_engine.cli.run import conclude
    from skyrl_engine.config import Option, load, resolve
    from skyrl_engine.run.directory import RunDirectory

    began = time.monotonic()
    settings = current_settings()
    chosen = recipe(model)
    tasks = chosen.tasks() if only is None else None
    directory = _new_directory(output, model)
    for trainer in ("sft", "rl") if tasks else ("sft",):
        # a missing plugin is reported before anything takes time
        resolve(load(None, (), {"trainer": Option("demo", trainer)}), need=())
    if not settings.quiet:
        render.show_heading("Getting ready")
    preparation = chosen.prepare(directory, steps or chosen.default_steps)
    config_file = _write_files(directory, preparation, chosen)
    before = chosen.examine(preparation.model)
    if not settings.quiet:
        render.show_lines([*preparation.facts, _score_line("before training", chosen, before)])
        render.show_heading("Training")

    held_out = HeldOutLoss()
    run_directory = RunDirectory(directory / "run")
    result = _train(config_file, run_directory, settings, [held_out])
    if result.stopped_by is not None:
        return conclude(result)
    after = chosen.examine(run_directory.model)
    render.show_heading("What it learned")
    render.show_table(("", "before", "after"), _comparison(chosen, before, after, held_out.losses))
    echo()
    render.show_table(
        ("held-out question", "before", "after", "expected"),
        [
            tuple(map(_shorten, row))
            for row in list(zip(before.questions, before.answers, after.answers, after.expected, strict=True))[:_EXAMPLES]
        ],
    )
    if tasks:
        second_act.prepare(directory, *tasks, steps)
        stopped = _reward(directory, chosen, settings)
        if stopped is not None:
            return conclude(stopped)
    render.show_heading(f"Done in {time.monotonic() - began:.0f} s")
    render.show_lines(
        [
            f"run directory: {run_directory.path}  (run.json, metrics.jsonl, checkpoints/, and the trained model in model/)",
            "next, the same run with a loss of your own, from a file you can change:",
            f"    {_next_command(directory, config_file)}",
            *(_next_of_rewards(directory) if tasks else ()),
            "and a proof on this machine that gradients do not depend on how a batch is cut, or on how many ranks:",
            "    skyrl-engine prove",
        ]
    )
    return 0


def _reward(directory: Path, chosen: "DemoRecipe", settings: CommandSettings) -> "RunResult | None":
    """Train the model of the first act by a reward, and show what that changed; returns the result of a run that was stopped."""
    from skyrl_engine.cli import render
    from skyrl_engine.cli.demo import second_act
    from skyrl_engine.run.directory import RunDirectory

    warm, rl = RunDirectory(directory / "warm"), RunDirectory(directory / "rl")
    if not settings.quiet:
        render.show_heading("A second act: no answers, only a reward")
        render.show_lines(
            [
                "warm start: the model gets two habits more. Of its new training data a third spells the word backward,",
                "a third repeats it, a third sorts its letters: the question is the same, so it can only guess which is wanted",
            ]
        )
    result = _train(directory / second_act.WARM_FILE, warm, settings)
    if result.stopped_by is not None:
        return result
    before = chosen.examine(warm.model)
    if not settings.quiet:
        render.show_lines(
            [
                _score_line("after the warm start", chosen, before),
                f"now it tries each word 8 times, and {second_act.REWARD_FILE} says how much of the answer is right; it is told nothing else",
            ]
        )
    result = _train(directory / second_act.RL_FILE, rl, settings)
    if result.stopped_by is not None:
        return result
    after = chosen.examine(rl.model)
    render.show_heading("What the reward changed")
    rows = [("held-out reward", *(f"{sum(examination.rewards) / len(examination.rewards):.3f}" for examination in (before, after)))]
    render.show_table(("", "before", "after"), [*rows, *_comparison(chosen, before, after, [])])
    echo()
    render.show_table(
        ("held-out question", "before", "reward", "after", "reward"),
        [tuple(map(_shorten, row)) for row in second_act.compare_answers(before, after)],
    )
    echo()
    render.show_lines(
        [
            "The reward taught no new skill: the first act taught to spell backward, and the warm start still did so at times.",
            "Training by reinforcement found out which of three habits is paid, and made that one likely.",
        ]
    )
    return None


def _train(
    config_file: Path, run_directory: "RunDirectory", settings: CommandSettings, observers: Sequence[object] = ()
) -> "RunResult":
    from skyrl_engine.cli.training import train
    from skyrl_engine.config import Option, load, resolve

    where = {"run.directory": Option("--output", str(run_directory.path))}
    return train(resolve(load(config_file, (), where)), settings, observers)


def _new_directory(output: Path | None, model: str) -> Path:
    """Return an empty directory: the given one, or a new one. Raises ConfigError when there is something in it."""
    from skyrl_engine.run.directory import RUNS

    directory = output or RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-demo-{model}"
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError([Problem(f"--output {directory}", "is not an empty directory", "Name a new one")])
    directory.mkdir(parents=True, exist_ok=True)
    if output is None:
        _link_last(directory)
    return directory


def _link_last(directory: Path) -> None:
    """Let `runs/demo` mean this demo, where links are possible and nothing else has the name."""
    link = directory.parent / LAST
    if link.is_symlink() or not link.exists():
        with suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(directory.name)


def _write_files(directory: Path, preparation: "Preparation", chosen: "DemoRecipe") -> Path:
    from skyrl_engine.config.report import to_toml

    config_file = directory / CONFIG_FILE
    header = f"# Written by `skyrl-engine demo --model {chosen.name}`. Run it again: skyrl-engine run {visible_line(str(config_file))}\n\n"
    config_file.write_text(header + to_toml(preparation.config), encoding="utf-8")
    (directory / LOSS_FILE).write_text(_LOSS, encoding="utf-8")
    return config_file


def _score_line(when: str, chosen: "DemoRecipe", examination: "Examination") -> str:
    if examination.score is None:
        return f"{when}: {len(examination.questions)} held-out questions asked, to compare the answers"
    return f"{when}: {chosen.score_name} {examination.score:.1%} of {len(examination.questions)} held-out questions"


def _comparison(
    chosen: "DemoRecipe", before: "Examination", after: "Examination", losses: list[tuple[int, float]]
) -> list[tuple[str, str, str]]:
    rows = []
    if before.score is not None and after.score is not None:
        rows.append((f"held-out {chosen.score_name}", f"{before.score:.1%}", f"{after.score:.1%}"))
    if len(losses) > 1:
        rows.append(("held-out loss", f"{losses[0][1]:.4f}", f"{losses[-1][1]:.4f}"))
    return rows


def _shorten(text: str) -> str:
    """Return one line of at most 60 characters that shows control characters and emptiness."""
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    if not line:
        return "(nothing)"
    return line if len(line) <= 60 else f"{line[:57]}..."


def _next_of_rewards(directory: Path) -> list[str]:
    from skyrl_engine.cli.demo import second_act

    return [
        f"or with a reward of your own, once you changed {directory / second_act.REWARD_FILE}:",
        f"    skyrl-engine run {directory / second_act.RL_FILE}",
        "what the model tried, and what it earned:",
        f"    skyrl-engine rollouts show {directory / 'rl'} --best",
    ]


def _next_command(directory: Path, config_file: Path) -> str:
    loss = directory / LOSS_FILE
    reference = str(loss) if loss.is_absolute() else f"./{loss}"
    return f"skyrl-engine run {config_file} --loss {reference}:my_loss loss.gamma=1.0"
