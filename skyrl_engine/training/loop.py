"""The loop under every trainer: steps, evaluations, checkpoints, the exported model, and an end when somebody asks for one."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from attrs import define, field, frozen

from skyrl_engine.config.schema import CheckpointConfig, EvaluationConfig, RunConfig
from skyrl_engine.contracts.kinds.observer import EvaluationFinished, StepFinished
from skyrl_engine.engine.engine import Engine
from skyrl_engine.errors import ConfigError, EngineError
from skyrl_engine.run.log import tell
from skyrl_engine.run.session import RunSession
from skyrl_engine.spans import Spans
from skyrl_engine.training.best import BestCheckpoint
from skyrl_engine.training.profiled_steps import ProfiledSteps
from skyrl_engine.training.teacher import warn_of_few_aligned

logger = logging.getLogger(__name__)


@frozen
class RunResult:
    """`step` optimizer steps are done, `metrics` are the last step's (and `evaluation_loss`, where there was an evaluation).

    `stopped_by` names the signal that ended the run early; resuming goes on from there. `best_step` is the step of the best checkpoint, None
    where the run looks for none.
    """

    directory: Path
    step: int
    metrics: Mapping[str, float]
    stopped_by: str | None = None
    best_step: int | None = None


@frozen
class StepDone:
    """One step of a trainer: its metrics, among them `tokens`, and CPU seconds by span over controller and ranks.

    `phases` are wall seconds by phase, of a trainer that knows them: the loop reports them as `time/*`, and what is left of the step as
    `time/other`. `ends` is raised once the step is recorded and a checkpoint of it is written; None: the run goes on.
    """

    metrics: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    ends: EngineError | None = None
    phases: Mapping[str, float] | None = None


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
    """Drives a source from the session's step to `total_steps`, or until evaluations get no better.

    `run_config` says where ranks compute, and which steps are profiled.
    """

    session: RunSession
    engine: Engine
    source: StepSource
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    total_steps: int
    run_config: RunConfig
    _spans: Spans = field(factory=Spans, init=False)
    _metrics: dict[str, float] = field(factory=dict, init=False)
    _best: BestCheckpoint | None = field(init=False)
    _warned: bool = field(default=False, init=False)

    @_best.default
    def _restore_best(self) -> BestCheckpoint | None:
        return BestCheckpoint.restore(self.evaluation, self.session.resumed_from, self.session.checkpoints)

    def run(self) -> RunResult:
        """Go to the last step, to the end of the one during which a signal came, or until `evaluation.patience` is out.

        Raises what a step says ends the run, and ConfigError for an `evaluation.best` that evaluations do not report. A checkpoint that is
        being written meanwhile is whole before this returns or raises, unless it cannot be written.
        """
        try:
            return self._run()
        except Exception as error:
            self.session.end_saves_despite(error)
            raise

    def _run(self) -> RunResult:
        session, total = self.session, self.total_steps
        profiled = ProfiledSteps.of(self.run_config, self.engine, session.directory.profile, session.step, total)
        if self.evaluation.at_start and session.step == 0:
            self._evaluate()
        while session.step < total and not session.stop and not self._is_out_of_patience:
            profiled.before_step(session.step + 1)
            done = self._step(session.step + 1)
            step = session.step
            profiled.after_step(step, ends=done.ends is not None)
            if done.ends is not None:
                self._save()
                raise done.ends
            # Evaluation comes before the checkpoint: what a resume finds done, it need not do again.
            is_best = False
            if _is_due(step, self.evaluation.every) or (step == total and self.evaluation.at_end):
                is_best = self._evaluate()
            if is_best or _is_due(step, self.checkpoint.every):
                self._save()
            else:
                session.look_at_saves()
        profiled.after_step(session.step, ends=True)
        ended = session.step >= total or self._is_out_of_patience
        if self._is_out_of_patience and session.step < total:
            tell(logger, self._describe_early_end())
        if session.step > 0 and (self.checkpoint.at_end or (session.stop and self.checkpoint.every is not None)):
            self._save()
        session.look_at_saves(wait=True)
        if ended and self.checkpoint.at_end and not session.directory.model.exists():
            self._export()
        best_step = None if self._best is None else self._best.step
        return RunResult(session.directory.path, session.step, self._metrics, session.stop.signal_name, best_step)

    @property
    def _is_out_of_patience(self) -> bool:
        patience = self.evaluation.patience
        return self._best is not None and patience is not None and self._best.stalled >= patience

    def _describe_early_end(self) -> str:
        best = self._best
        assert best is not None, "only evaluations of a best metric end a run early"
        found = "no evaluation was finite" if best.step is None else f"the best was {best.score:.6g} after step {best.step}"
        return (
            f"the run ends after step {self.session.step} of {self.total_steps}: {best.stalled} evaluations in a row (evaluation.patience) "
            f"brought no better {best.metric}; {found}"
        )

    def _export(self) -> None:
        """Write the model of the best checkpoint, or of the last step where the run looks for none; the engine's own state is lost then."""
        session, best = self.session, self._best
        if best is not None and best.step is None:
            logger.warning("no evaluation gave a finite %s: the model of the last step is exported", best.metric)
        elif best is not None and best.step != session.step:
            checkpoint = session.checkpoints.at(best.step)
            checkpoint.verify()
            self.engine.load(checkpoint.state, update_generators=False)
            tell(logger, f"{session.directory.model} is the best model, of step {best.step} ({best.metric} {best.score:.6g})")
        self.engine.export(session.directory.model)

    def _step(self, step: int) -> StepDone:
        started, controller_started = time.perf_counter(), time.process_time()
        done = self.source.step(step)
        seconds, controller = time.perf_counter() - started, time.process_time() - controller_started
        self._warned = self._warned or warn_of_few_aligned(step, done.metrics)
        # Observers' time after the step before counts as this step's.
        cpu_seconds = {**done.cpu_seconds, **self._spans.drain()}
        if self.run_config.launch == "inline":
            # One process: the time that no span claims is the engine's as well.
            cpu_seconds["other"] = max(0.0, controller - sum(done.cpu_seconds.values()))
        self._metrics = {**done.metrics, "tokens_per_second": done.metrics["tokens"] / seconds}
        if done.phases is not None:
            phases = {**done.phases, "other": max(0.0, seconds - sum(done.phases.values()))}
            self._metrics |= {f"time/{phase}": spent for phase, spent in phases.items()}
        with self._spans("observe"):
            event = StepFinished(step, self.total_steps, self._metrics, seconds, cpu_seconds, self.engine.drain_peak_bytes())
            self.session.step_finished(event)
        return done

    def _evaluate(self) -> bool:
        """Evaluate, and return True where the evaluation is the best one so far of those after a step."""
        started = time.perf_counter()
        metrics = self.source.evaluate()
        if metrics is None:
            return False
        self._metrics |= {"evaluation_loss": metrics["loss"]} if "loss" in metrics else metrics
        self.session.evaluation_finished(EvaluationFinished(self.session.step, metrics, time.perf_counter() - started))
        if self._best is None:
            return False
        if self.session.step == 0:
            self._best.require_metric(metrics)
            return False
        try:
            return self._best.look(self.session.step, metrics, self.evaluation.min_delta)
        except ConfigError:
            # a resume with another evaluation.best goes on from here
            if self.checkpoint.at_end or self.checkpoint.every is not None:
                self._save()
            raise

    def _save(self) -> None:
        best = None if self._best is None else self._best.document()
        self.session.save_checkpoint(self.engine, self.source.state(), best, asynchronous=self.checkpoint.asynchronous)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
