"""A metric of torchmetrics, or one with its methods, as an observer of a run: updated by events, written after every step."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from skyrl_engine.contracts.kinds.observer import EvaluationFinished, RolloutsFinished, SessionStarted, StepFinished
from skyrl_engine.errors import ContractError
from skyrl_engine.hooks.markers import hookimpl

Event = RolloutsFinished | StepFinished | EvaluationFinished
Read = Callable[[Event], tuple[Any, ...] | None]
"""The arguments of the metric's `update` for an event; None: the event is not for this metric."""


def metric_observer(metric: Any, read: Read, *, name: str | None = None, over: int | None = 1) -> "MetricPlugin":
    """Return a plugin of the kind observer that updates `metric` with `read(event)` and writes what it computes after every step.

    `metric` has `update`, `compute` and `reset`, as those of torchmetrics have; a collection of metrics has too. Lines of NAME.jsonl in the run
    directory hold `step` and `value`: a number, a list, or a mapping of them. After `over` lines the metric is
    reset; None: never, so that a value is of all steps of the session. A resumed run takes out the lines of steps that it makes again.
    """
    for method in ("update", "compute", "reset"):
        if not callable(getattr(metric, method, None)):
            raise ContractError(
                f"{type(metric).__name__} has no method {method}",
                remedy="Give a metric of torchmetrics, or an object with its methods",
            )
    return MetricPlugin(metric, read, name or type(metric).__name__, over)


@frozen(eq=False)
class MetricPlugin:
    """The product of `metric_observer`."""

    metric: Any
    read: Read
    name: str
    over: int | None

    @hookimpl
    def skyrl_engine_make_observer(self) -> "MetricObserver":
        return MetricObserver(self.metric, self.read, self.name, self.over)


@define(eq=False)
class MetricObserver:
    """One session told to a metric."""

    metric: Any
    read: Read
    name: str
    over: int | None
    _file: Path | None = field(default=None, init=False)
    _updated: bool = field(default=False, init=False)
    _lines: int = field(default=0, init=False)

    @hookimpl
    def skyrl_engine_session_started(self, event: SessionStarted) -> None:
        self._file = event.directory / f"{self.name}.jsonl"
        kept = []
        if self._file.exists():
            lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
            # a kill may cut the last line
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= event.start_step]
        self._file.write_text("".join(kept), encoding="utf-8")
        self.metric.reset()

    @hookimpl
    def skyrl_engine_rollouts_finished(self, event: RolloutsFinished) -> None:
        self._update(event)

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self._update(event)
        self._write(event.step)

    @hookimpl
    def skyrl_engine_evaluation_finished(self, event: EvaluationFinished) -> None:
        self._update(event)
        self._write(event.step)

    def _update(self, event: Event) -> None:
        arguments = self.read(event)
        if arguments is not None:
            self.metric.update(*arguments)
            self._updated = True

    def _write(self, step: int) -> None:
        """Write the metric's value if it was updated since the last line."""
        if not self._updated:
            return
        assert self._file is not None, "the session has started"
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, "value": _to_json(self.metric.compute())}) + "\n")
        self._updated = False
        self._lines += 1
        if self.over is not None and self._lines % self.over == 0:
            self.metric.reset()


def _to_json(value: Any) -> Any:
    """Return numbers, lists and mappings of tensors as JSON has them; numbers that are not finite as null."""
    if isinstance(value, dict):
        return {str(name): _to_json(own) for name, own in value.items()}
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, list | tuple):
        return [_to_json(own) for own in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
