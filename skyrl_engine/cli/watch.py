"""`skyrl-engine runs watch`: a run on one screen, from another terminal."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from skyrl_engine.cli.command import EngineCommand
from skyrl_engine.cli.terminal import echo

if TYPE_CHECKING:
    from skyrl_engine.cli.render import Screen
    from skyrl_engine.contracts.values.rollout import Trajectory
    from skyrl_engine.report.watched import WatchedRun

_CURVES = (
    *("reward/mean", "rollout/success", "loss", "evaluation/avg@*", "rewards/accuracies", "rewards/margins", "accuracy"),
    *("policy/entropy", "policy/gap_mean", "rollout/tokens_mean", "grad_norm", "learning_rate", "tokens_per_second", "seconds"),
)
"""Patterns of the metrics whose curves are shown, in their order, as far as a run has them."""
_ATTEMPTS = 2
_BLOCKS = "▁▂▃▄▅▆▇█"
_BESIDE_CURVE = 58
"""Columns of a line that the curve leaves to the metric's name and its numbers."""
_FACTS = 6
"""Lines above the curves."""


@click.command(cls=EngineCommand)
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="METRIC",
    help="Show the curve of this metric, or of those that fit loss*. Several times.",
)
@click.option("--every", type=click.FloatRange(min=0.1), default=1.0, show_default=True, metavar="SECONDS", help="Look so often.")
def watch(run: Path, metrics: tuple[str, ...], every: float) -> None:
    """Follow the run directory RUN on one screen: state, time left, curves, best evaluation and, in RL, the last attempts.

    It ends with the run; Ctrl-C ends it before, and does nothing to the run. Into a pipe it writes a line for a step now and then.
    """
    from skyrl_engine.report.watched import watch_run

    if sys.stdout.isatty():
        from skyrl_engine.cli.render import show_screens

        watched = watch_run(run)
        with suppress(KeyboardInterrupt):
            show_screens(_make_screens(watched, metrics, every))
    else:
        from skyrl_engine.cli.progress import ProgressLines

        watched = watch_run(run, ProgressLines(echo))
        for _ in _follow(watched, every):
            pass
    if watched.state.word in ("never started", "damaged", "unreadable"):
        from skyrl_engine.errors import EngineError

        raise EngineError(f"{run} cannot be followed ({watched.state})", remedy="Look into its run.log")
    echo(f"{run}: {watched.state}")


def _follow(watched: "WatchedRun", every: float, attempts: int = 0) -> Iterator[None]:
    """Refresh a run again and again until it is over, and yield after every time."""
    while True:
        watched.refresh(attempts)
        yield
        if watched.is_over:
            return
        time.sleep(every)


def _make_screens(watched: "WatchedRun", metrics: tuple[str, ...], every: float) -> Iterator["Screen"]:
    yield make_screen(watched, metrics)  # reading a long run takes seconds
    for _ in _follow(watched, every, _ATTEMPTS):
        yield make_screen(watched, metrics)


def make_screen(watched: "WatchedRun", metrics: tuple[str, ...]) -> "Screen":
    """Return what there is to see of a run now, as it fits the terminal."""
    from skyrl_engine.cli.progress import duration
    from skyrl_engine.cli.render import Screen

    columns, lines = shutil.get_terminal_size()
    progress, best = watched.progress, watched.best
    speed = "" if progress.tokens_per_second is None else f", {progress.tokens_per_second:,.0f} tokens/s"
    left = f"{duration(progress.seconds_left)}{speed}" if watched.state.is_live else "-"
    facts = {
        "state": str(watched.state),
        "step": f"{watched.table.last_step:,} of {watched.table.total_steps or 0:,}",
        "left": left,
        "best": "no evaluation yet" if best is None else f"{best.metric} {best.value:.6g} after step {best.step:,}",
    }
    passages = [_describe_attempt(watched, name, attempt, columns) for name, attempt in watched.attempts]
    room = max(1, lines - _FACTS - 2 - sum(1 + len(texts) for _, texts in passages))
    curves = [row for name in _choose_curves(watched, metrics) if (row := _draw_curve(watched, name, columns)) is not None]
    return Screen(
        str(watched.directory.path), watched.table.last_step, watched.table.total_steps or 0, facts, curves[:room], passages
    )


def _choose_curves(watched: "WatchedRun", patterns: tuple[str, ...]) -> list[str]:
    from fnmatch import fnmatchcase

    from skyrl_engine.report.charts import bounds_of

    names = [*watched.table.steps, *watched.table.evaluations]
    ends = set() if patterns else {end for name in names for end in bounds_of(name)}
    names = [name for name in names if name not in ends]
    return list(dict.fromkeys(name for pattern in patterns or _CURVES for name in names if fnmatchcase(name, pattern)))


def _draw_curve(watched: "WatchedRun", name: str, columns: int) -> tuple[str, str, str, str] | None:
    """Return a metric's name, its curve, its last value, and its lowest and highest."""
    series = watched.read_series(name)
    if series is None or not len(series.values):
        return None
    from skyrl_engine.report.series import shorten

    values = shorten(series, max(10, columns - _BESIDE_CURVE)).values.tolist()
    lowest, highest = float(series.values.min()), float(series.values.max())
    return name, draw_sparkline(values), f"{series.values[-1]:.4g}", f"{lowest:.4g} to {highest:.4g}"


def draw_sparkline(values: list[float]) -> str:
    """Return a curve of one line: a block for each value, the lowest of which is the lowest block."""
    lowest, highest = min(values), max(values)
    height = (highest - lowest) or 1.0
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int((value - lowest) / height * len(_BLOCKS)))] for value in values)


def _describe_attempt(watched: "WatchedRun", name: str, attempt: "Trajectory", columns: int) -> tuple[str, list[tuple[str, str]]]:
    """Return a heading, and the ends of the last prompt and of what was sampled, one line each."""
    from skyrl_engine.rollout.exported import segments_of

    kinds = ("prompt", "sampled", "observed")
    texts = [(kinds[kind], watched.decode(attempt.token_ids[places])) for kind, places in segments_of(attempt)]
    room = max(20, columns - 12)
    shown = [(kind, " ".join(text.split())) for kind, text in texts[-3:]]
    cut = [(kind, text if len(text) <= room else f"...{text[-room + 3 :]}") for kind, text in shown]
    return f"{name}: reward {attempt.reward:.4g}, {len(attempt.logprobs)} tokens", cut
