"""The loop under every trainer: steps, evaluations, checkpoints, the exported model, and an end when somebody asks for one."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from attrs import define, field, frozen

from skyrl_engine.config.schema import CheckpointConfig, EvaluationConfig
from skyrl_engine.contracts.kinds.observer import EvaluationFinished, StepFinished
from skyrl_engine.engine.engine import Engine
from skyrl_engine.errors import EngineError
from skyrl_engine.run.session import RunSession
from skyrl_engine.spans import Spans


@frozen
class RunResult:
    """`step` optimizer steps are done, `metrics` are the last step's (and `evaluation_loss`, where there was an evaluation).

    `stopped_by` names the signal that ended the run early; resuming goes on from there.
    """

    directory: Path
    step: int
    metrics: Mapping[str, float]
    stopped_by: str | None = None


@frozen
class StepDone:
    """One step of a trainer: its metrics, among them `tokens`, and CPU seconds by span over controller and ranks.

    `ends` is raised once the step is recorded and a checkpoint of it is written; None: the run goes on.
    """

    metrics: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    ends: EngineError | None = None


class StepSource(Protocol):
    """A trainer's part of the loop: it does a step, measures held-out data, and says what of itself a checkpoint holds."""

    def step(self, number: int) -> StepDone:
        """Do step `number`, counted from 1."""

    def evaluate(self) -> Mapping[str, float] | None:
        """Metrics of held-out data, with `loss` where that is what is measured; None where there is none."""

    def state(self) -> Mapping[str, Any]:
        """JSON values that say how far the trainer is."""


@define(eq=False)
class Loop:
    """Drives a source from the session's step to `total_steps`. `inline` says that ranks compute in this process."""

    session: RunSession
    engine: Engine
    source: StepSource
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    total_steps: int
    inline: bool
    _spans: Spans = field(factory=Spans, init=False)
    _metrics: dict[str, float] = field(factory=dict, init=False)

    def run(self) -> RunResult:
        """Go to the last step, or to the end of the one during which a signal came. Raises what a step says ends the run."""
        session, total = self.session, self.total_steps
        if self.evaluation.at_start and session.step == 0:
            self._evaluate()
        while session.step < total and not session.stop:
            done = self._step(session.step + 1)
            step = session.step
            if done.ends is not None:
                self._save()
                raise done.ends
            # Evaluation comes before the checkpoint: what a resume finds done, it need not do again.
            if _is_due(step, self.evaluation.every) or (step == total and self.evaluation.at_end):
                self._evaluate()
            if _is_due(step, self.checkpoint.every):
                self._save()
        if session.step > 0 and (self.checkpoint.at_end or (session.stop and self.checkpoint.every is not None)):
            self._save()
        if session.step >= total and self.checkpoint.at_end and not session.directory.model.exists():
            self.engine.export(session.directory.model)
        return RunResult(session.directory.path, session.step, self._metrics, session.stop.signal_name)

    def _step(self, step: int) -> StepDone:
        started, controller_started = time.perf_counter(), time.process_time()
        done = self.source.step(step)
        seconds, controller = time.perf_counter() - started, time.process_time() - controller_started
        # Observers' time after the step before counts as this step's.
        cpu_seconds = {**done.cpu_seconds, **self._spans.drain()}
        if self.inline:
            # One process: the time that no span claims is the engine's as well.
            cpu_seconds["other"] = max(0.0, controller - sum(done.cpu_seconds.values()))
        self._metrics = {**done.metrics, "tokens_per_second": done.metrics["tokens"] / seconds}
        with self._spans("observe"):
            event = StepFinished(step, self.total_steps, self._metrics, seconds, cpu_seconds, self.engine.drain_peak_bytes())
            self.session.step_finished(event)
        return done

    def _evaluate(self) -> None:
        started = time.perf_counter()
        metrics = self.source.evaluate()
        if metrics is None:
            return
        self._metrics |= {"evaluation_loss": metrics["loss"]} if "loss" in metrics else metrics
        self.session.evaluation_finished(EvaluationFinished(self.session.step, metrics, time.perf_counter() - started))

    def _save(self) -> None:
        self.session.save_checkpoint(self.engine.save, self.engine.keep_model_files, self.source.state())


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
