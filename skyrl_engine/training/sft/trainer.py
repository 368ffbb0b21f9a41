"""Supervised fine-tuning: the loop over mini-batches, with evaluation, checkpoints and an exact resume."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from attrs import define, field, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.observer import EvaluationFinished, StepFinished
from skyrl_engine.contracts.values.outputs import results_of
from skyrl_engine.engine.step import StepDriver
from skyrl_engine.run.session import RunSession, open_session
from skyrl_engine.spans import Spans
from skyrl_engine.training.evaluation import evaluate
from skyrl_engine.training.export import write_model
from skyrl_engine.training.sft.data import DataProgress, PreparedRun, describe_data, prepare
from skyrl_engine.training.sft.order import Position
from skyrl_engine.training.sft.plan import RunPlan, describe_plan
from skyrl_engine.training.state import TrainerState, fingerprint, position_in
from skyrl_engine.workers.launch import WorkerGroup, launch_workers


@frozen
class RunResult:
    """`step` optimizer steps are done, `metrics` are the last step's (and `evaluation_loss`, where there was an evaluation).

    `stopped_by` names the signal that ended the run early; resuming goes on from there.
    """

    directory: Path
    step: int
    metrics: Mapping[str, float]
    stopped_by: str | None = None


def plan_sft(resolved: ResolvedConfig, *, progress: DataProgress | None = None) -> RunPlan:
    """Do everything up to starting ranks, and say what the run would do. Writes no run directory."""
    return describe_plan(prepare(resolved, progress))


def run_sft(
    resolved: ResolvedConfig,
    *,
    observers: Sequence[object] = (),
    resume: bool | None = None,
    progress: DataProgress | None = None,
) -> RunResult:
    """Train to the configured end, or until a signal asks to stop.

    `observers` listen beside those of the configuration; `resume` overrides `checkpoint.resume`; `progress` is told how far the data is.
    Whatever goes wrong ends the ranks, is recorded in the run directory, and is raised again.
    """
    config = resolved.config
    with open_session(resolved, trainer="sft", observers=observers, resume=resume) as session:
        prepared = prepare(resolved, progress)
        checkpoint = session.resumed_from
        data = fingerprint(prepared.train.columns)
        position = prepared.order.start() if checkpoint is None else position_in(checkpoint, prepared.order, data)
        session.record_start(
            seeds={"run": config.run.seed},
            world={"launch": config.run.launch, "ranks": config.run.ranks, **attrs.asdict(prepared.description.topology)},
            data={
                "train": {**(describe_data(prepared.train) or {}), "sha256": data},
                "evaluation": describe_data(prepared.evaluation),
            },
        )
        with launch_workers(prepared.worker_spec(), launch=config.run.launch, ray_address=config.run.ray_address) as group:
            if checkpoint is not None:
                group.load(checkpoint.state)
            session.announce_start(prepared.total_steps)
            metrics = SftTrainer(prepared, session, group, prepared.driver(group), position, data).train()
        return RunResult(session.directory.path, session.step, metrics, session.stop.signal_name)


@define(eq=False)
class SftTrainer:
    """The training loop. Starts at the session's step and `position` in the sample order; `data` is the training data's fingerprint."""

    prepared: PreparedRun
    session: RunSession
    group: WorkerGroup
    driver: StepDriver
    position: Position
    data: str
    _spans: Spans = field(factory=Spans, init=False)
    _metrics: dict[str, float] = field(factory=dict, init=False)

    def train(self) -> Mapping[str, float]:
        """Go to the last step, or to the end of the one during which a signal came. Returns the last metrics."""
        config = self.prepared.resolved.config
        total = self.prepared.total_steps
        if config.evaluation.at_start and self.session.step == 0:
            self._evaluate()
        while self.session.step < total and not self.session.stop:
            self._step(self.session.step + 1)
            step = self.session.step
            # Evaluation comes before the checkpoint: what a resume finds done, it need not do again.
            if _is_due(step, config.evaluation.every) or (step == total and config.evaluation.at_end):
                self._evaluate()
            if _is_due(step, config.checkpoint.every):
                self._save()
        if self.session.step > 0 and (config.checkpoint.at_end or (self.session.stop and config.checkpoint.every is not None)):
            self._save()
        if self.session.step >= total and config.checkpoint.at_end and not self.session.directory.model.exists():
            prepared = self.prepared
            write_model(self.group, config.model, prepared.tokenizer, prepared.vision, self.session.directory.model)
        return self._metrics

    def _step(self, step: int) -> None:
        started, controller_started = time.perf_counter(), time.process_time()
        with self._spans("data"):
            chosen, self.position = self.prepared.order.mini_batch(self.position)
            columns = self.prepared.train.batch(chosen)
        result = self.driver.train(columns, step=step, per_token_outputs=False)
        seconds, controller = time.perf_counter() - started, time.process_time() - controller_started
        spent = self._spans.drain()  # with the observers' time after the step before
        cpu_seconds = _added(result.cpu_seconds, spent)
        if self.prepared.resolved.config.run.launch == "inline":  # one process: what no span claims is the engine's as well
            claimed = sum(result.cpu_seconds.values()) + spent["data"]
            cpu_seconds["other"] = max(0.0, controller - claimed)
        metrics = results_of(result.metrics)
        self._metrics = {
            **metrics,
            "epoch": self.position.epoch + self.position.offset / self.prepared.order.samples,
            "tokens_per_second": metrics["tokens"] / seconds,
        }
        with self._spans("observe"):
            self.session.step_finished(StepFinished(step, self.prepared.total_steps, self._metrics, seconds, cpu_seconds))

    def _evaluate(self) -> None:
        dataset = self.prepared.evaluation
        if dataset is None:
            return
        started = time.perf_counter()
        metrics = evaluate(self.driver, dataset, batch_size=self.prepared.order.batch_size, step=self.session.step)
        self._metrics["evaluation_loss"] = metrics["loss"]
        self.session.evaluation_finished(EvaluationFinished(self.session.step, metrics, time.perf_counter() - started))

    def _save(self) -> None:
        prepared = self.prepared
        state = TrainerState.create(self.session.step, self.position, prepared.order, self.data)
        self.session.save_checkpoint(self.group.save, state.document())


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _added(*clocks: Mapping[str, float]) -> dict[str, float]:
    spans = dict.fromkeys(name for clock in clocks for name in clock)
    return {name: sum(clock.get(name, 0.0) for clock in clocks) for name in spans}
