"""The best evaluation of a run, and the checkpoint that belongs to it."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeGuard

from attrs import frozen

from skyrl_engine.config.schema.evaluation import find_best_end
from skyrl_engine.errors import ConfigError, Problem

_ENDS = ("*_low", "*_high")
"""Ends of the interval around another metric."""
_PREFERRED = ("evaluation/avg@*", "evaluation/reward*", "loss")
"""Metrics by which a run is judged where nobody says which, the first that it has."""

Evaluations = Mapping[int, Mapping[str, float]]
"""Finite numbers of every evaluation, by step."""


@frozen
class Best:
    """The best value of a metric of evaluations, and the step after which it was measured, the first of several."""

    metric: str
    value: float
    step: int


def is_higher_better(metric: str) -> bool | None:
    """Say by a metric's name if higher values are better; None where the name does not tell."""
    return {"highest": True, "lowest": False, None: None}[find_best_end(metric)]


def choose_metric(names: Iterable[str]) -> str | None:
    """Return the metric by which a run's evaluations are compared where nobody names one; None where it has none of those."""
    named = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in _ENDS)]
    return next((name for pattern in _PREFERRED for name in named if fnmatchcase(name, pattern)), None)


def read_metric(config: object) -> tuple[str | None, bool | None]:
    """Return the metric by which the configuration of a run says which evaluation is the best (`evaluation.best`), and if higher is better.

    Each is None where it does not say it, as is both for a configuration that cannot be read.
    """
    evaluation = config.get("evaluation") if isinstance(config, Mapping) else None
    named = evaluation.get("best") if isinstance(evaluation, Mapping) else None
    if not isinstance(evaluation, Mapping) or not isinstance(named, str):
        return None, None
    return named, {"highest": True, "lowest": False}.get(str(evaluation.get("best_is")))


def rank_steps(evaluations: Evaluations, metric: str, *, higher: bool | None = None) -> list[int]:
    """Return the steps whose evaluation has the metric, the best first and the earlier first of equal ones.

    `higher` says if higher values are better; None: as the name says. Raises ConfigError for a metric that no evaluation has, or whose name
    does not say which values are better.
    """
    values = {step: metrics[metric] for step, metrics in evaluations.items() if metric in metrics}
    if not values:
        names = _list_names(evaluations)
        remedy = f"Name one of {', '.join(names)}" if names else "The run has no evaluations; set evaluation.every"
        raise ConfigError([Problem(f"metric {metric!r}", "is in no evaluation of the run", remedy)])
    higher = is_higher_better(metric) if higher is None else higher
    if higher is None:
        raise ConfigError(
            [Problem(f"metric {metric!r}", "does not say by its name which values are better", "Say --highest or --lowest")]
        )
    return sorted(values, key=lambda step: (-values[step] if higher else values[step], step))


def rank_checkpoints(
    saved: Iterable[int], evaluations: Evaluations, metric: str | None = None, *, higher: bool | None = None
) -> Sequence[int]:
    """Return the steps of checkpoints whose own weights were evaluated, the best first: `saved` are those that there are.

    `metric` None: `choose_metric`; empty where no checkpoint was evaluated. Raises as `rank_steps`.
    """
    present = frozenset(saved)
    chosen = choose_metric(_list_names(evaluations)) if metric is None else metric
    if chosen is None:
        return []
    return [step for step in rank_steps(evaluations, chosen, higher=higher) if step in present]


def _list_names(evaluations: Evaluations) -> list[str]:
    return list(dict.fromkeys(name for metrics in evaluations.values() for name in metrics))


Extremes = dict[str, dict[str, tuple[float, int]]]
"""The `lowest` and the `highest` value of every metric of evaluations so far, each with the first step after which it was measured."""


def update_extremes(extremes: Extremes, step: int, metrics: Mapping[str, float | None]) -> None:
    """Take the metrics of a further evaluation; None is a number that was not finite."""
    for name, value in metrics.items():
        if value is None:
            continue
        ends = extremes.setdefault(name, {"lowest": (value, step), "highest": (value, step)})
        if value < ends["lowest"][0]:
            ends["lowest"] = value, step
        if value > ends["highest"][0]:
            ends["highest"] = value, step


def is_extremes(value: object) -> TypeGuard[Extremes]:
    """Return True for what a record of an evaluation holds as its extremes, if nobody changed it."""
    return isinstance(value, dict) and all(
        isinstance(ends, dict) and all(_is_end(ends.get(name)) for name in ("lowest", "highest")) for ends in value.values()
    )


def _is_end(end: object) -> bool:
    return isinstance(end, list | tuple) and len(end) == 2 and isinstance(end[0], int | float) and isinstance(end[1], int)


def collect_extremes(evaluations: Evaluations) -> Extremes:
    """Return the extremes of evaluations."""
    extremes: Extremes = {}
    for step, metrics in evaluations.items():
        update_extremes(extremes, step, metrics)
    return extremes


def find_best(extremes: Extremes, metric: str | None = None, *, higher: bool | None = None) -> Best | None:
    """Return the best evaluation by a metric (None: `choose_metric`); None for one that there is not, or whose name does not tell.

    `higher` says if higher values are better; None: as the name says.
    """
    chosen = choose_metric(extremes) if metric is None else metric
    higher = is_higher_better(chosen or "") if higher is None else higher
    if chosen not in extremes or higher is None:
        return None
    value, step = extremes[chosen]["highest" if higher else "lowest"]
    return Best(chosen, value, step)
