"""Supervised fine-tuning: mini-batches of samples in a random order, with an exact resume."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import numpy as np
from attrs import define, field, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.needs import TEACHER_MODEL
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import results_of
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.plan import Plan
from skyrl_engine.objective.policy_metrics import Watched
from skyrl_engine.rollout.guard import SamplerGuard
from skyrl_engine.run.log import tell
from skyrl_engine.run.progress import LOADING
from skyrl_engine.run.session import open_session, recall_choices, to_resume_from
from skyrl_engine.spans import Spans
from skyrl_engine.training.idle import IdleSteps, explain_idle_objective
from skyrl_engine.training.loop import Loop, RunResult, StepDone
from skyrl_engine.training.sft.dry_run import RunPlan, describe_plan
from skyrl_engine.training.sft.evaluation import evaluate
from skyrl_engine.training.sft.order import Position
from skyrl_engine.training.sft.prepare import DataProgress, PreparedRun, describe_data, prepare
from skyrl_engine.training.sft.state import DataPosition, SftState
from skyrl_engine.training.sft.student_samples import SampledAnswers, StudentSampler, samples_answers
from skyrl_engine.training.source_metrics import name_losses_of_sources, shares_of_sources
from skyrl_engine.training.teacher import TEACHER
from skyrl_engine.workers.future import Future

logger = logging.getLogger(__name__)


def plan_sft(resolved: ResolvedConfig, *, progress: DataProgress | None = None) -> RunPlan:
    """Do everything up to starting ranks, and say what the run would do. Writes no run directory.

    A run that would be resumed is refused as it would be when it goes on.
    """
    return plan_on_data(prepare(recall_choices(resolved), progress))


def plan_on_data(prepared: PreparedRun, frozen: Sequence[FrozenModel] = ()) -> RunPlan:
    """Say what a prepared run over a dataset would do, as `plan_sft` does; `frozen` as in `describe_plan`."""
    resolved = prepared.resolved
    if resolved.assumed.lengths is None and (checkpoint := to_resume_from(resolved)) is not None:
        prepared.state_in(checkpoint)
    return describe_plan(prepared, frozen)


def run_sft(
    resolved: ResolvedConfig,
    *,
    observers: Sequence[object] = (),
    resume: bool | None = None,
    progress: DataProgress | None = None,
) -> RunResult:
    """Train to the configured end, or until a signal asks to stop.

    `observers` listen with those of the configuration; `resume` overrides `checkpoint.resume`; `progress` is called with how far the data is.
    Whatever goes wrong ends the ranks, is recorded in the run directory, and is raised again.
    """
    return train_on_data(resolved, partial(start_sft, progress=progress), observers=observers, resume=resume, progress=progress)


def start_sft(resolved: ResolvedConfig, *, progress: DataProgress | None = None) -> "Start":
    """Prepare a run of this trainer."""
    prepared = prepare(resolved, progress)
    return Start(prepared, partial(_trainer, prepared))


def _trainer(prepared: PreparedRun, place: "StartedRun") -> "SftTrainer":
    if prepared.teacher is not None:
        place.engine.add_frozen(prepared.teacher)
    trainer = SftTrainer(prepared, place.engine, place.position, place.data)
    config = prepared.resolved.config
    if samples_answers(prepared.resolved):
        place.engine.start_sampler(prepared.resolved.plugins["generator"], longest=prepared.longest, folder=place.generator)
        guard = SamplerGuard.of(None, config.model.dtype)
        trainer.student = StudentSampler(config.sampling, config.run.seed, place.engine, guard)
    return trainer


@frozen(eq=False)
class StartedRun:
    """The engine whose ranks have started, and where a run goes on: the position, the training data's fingerprint, the folder of the models
    that become the reference, the name of the one that it is, and the folder of what generators write.
    """

    engine: Engine
    position: DataPosition
    data: str
    references: Path
    reference: str | None
    generator: Path


@frozen(eq=False)
class Start:
    """A prepared run over a dataset, and what makes its trainer."""

    prepared: PreparedRun
    trainer: "Callable[[StartedRun], SftTrainer]"


def train_on_data(
    resolved: ResolvedConfig,
    start: Callable[[ResolvedConfig], Start],
    *,
    observers: Sequence[object],
    resume: bool | None,
    progress: DataProgress | None,
) -> RunResult:
    """Train a trainer that goes through a dataset, as `run_sft` says; `start` prepares it inside of the session."""
    config = resolved.config
    with open_session(resolved, observers=observers, resume=resume) as session:
        started = start(session.resolved)
        prepared = started.prepared
        checkpoint = session.resumed_from
        data = prepared.fingerprint
        state = None if checkpoint is None else prepared.state_in(checkpoint)
        position = prepared.start if state is None else state.position
        session.record_start(
            prepared.resolved,
            seeds={"run": config.run.seed},
            world={
                "launch": config.run.launch,
                "ranks": config.run.ranks,
                **attrs.asdict(prepared.assembly.description.topology),
            },
            data={
                "train": {**(describe_data(prepared.train, prepared.stream) or {}), "sha256": data},
                "evaluation": describe_data(prepared.evaluation),
            },
        )
        if not session.directory.samples.exists():
            shown = position if isinstance(position, Position) else prepared.order.start()
            session.keep_samples(prepared.train.columns, prepared.order.mini_batch(shown)[0])
        tell(logger, f"first mini-batch: {prepared.first_shape}")
        if progress is not None:
            progress(LOADING, 0, 0)
        with Engine.launch(prepared.resolved, prepared.assembly, prepared.files, prepared.total_steps) as engine:
            if checkpoint is not None:
                engine.load(checkpoint.state)
            session.announce_start(prepared.total_steps)
            reference = None if state is None else state.reference
            return Loop(
                session,
                engine,
                started.trainer(
                    StartedRun(engine, position, data, session.directory.reference, reference, session.directory.generator)
                ),
                evaluation=config.evaluation,
                checkpoint=config.checkpoint,
                total_steps=prepared.total_steps,
                run_config=config.run,
            ).run()


@frozen(eq=False)
class PlannedBatch:
    """A mini-batch as the engine cut it, before a rank has seen any of it, and the position after it; with the student's `answers` where these
    stand in the place of its own.
    """

    plan: Plan
    after: DataPosition
    answers: SampledAnswers | None = None


@define(eq=False)
class SftTrainer:
    """The steps of supervised fine-tuning, from `position` in the sample order on. `data` is the training data's fingerprint.

    While ranks work on a step, the mini-batch of the next one is read, cut and placed. `position` stays that of the steps that were begun, and
    an error in what was read ahead is raised by the step whose mini-batch it is.
    """

    name: ClassVar[str] = "sft"
    mean_over: ClassVar[Literal["tokens", "sequences"]] = "tokens"

    prepared: PreparedRun
    engine: Engine
    position: DataPosition
    data: str
    student: StudentSampler | None = field(default=None, init=False)
    """Samples the student's own answers in some of the steps; None: in none."""

    _idle: IdleSteps = field(factory=IdleSteps, init=False)
    _spans: Spans = field(factory=Spans, init=False)
    _ahead: Future[PlannedBatch] | None = field(default=None, init=False)

    @property
    def watch(self) -> tuple[Watched, ...]:
        """Metrics of the model that are not its losses'."""
        return ()

    @property
    def asks_ranks(self) -> bool:
        """Say whether a plan's columns are scored by the ranks, or by a server, so that its shards can be placed only in their own step."""
        return self.prepared.endpoint is not None or (
            self.prepared.teacher is not None and TEACHER in self.prepared.assembly.objective.columns
        )

    def complete(self, plan: Plan) -> Plan:
        """Add every column that the objective reads and the data lacks: the teacher's, where there is one, over this plan."""
        if not self.asks_ranks:
            return plan
        if self.prepared.endpoint is not None:
            return plan.with_columns(self.prepared.endpoint.score(plan.columns, self._spans))
        scores = self.engine.score(plan, tokens="loss", model=TEACHER_MODEL).result()
        return plan.with_columns({TEACHER: scores.on_actions("logprobs")})

    def step(self, number: int) -> StepDone:
        """One optimizer step on the next mini-batch."""
        assert number == self.engine.step + 1, "the loop and the engine count alike"
        sampled = self._is_sampled(number)
        batch = self._plan_student_answers(number) if sampled else self._take_next()
        self._ahead, self.position = None, batch.after
        plan = self.complete(batch.plan)
        columns = plan.columns
        # answers of the next step are sampled with the weights of this one
        ahead = number < self.prepared.total_steps and not self._is_sampled(number + 1)
        result = self.engine.train(
            plan,
            per_token_outputs=False,
            watch=(*self.watch, *(self.student.watch if self.student is not None and sampled else ())),
            meanwhile=self._plan_ahead if ahead else None,
        )
        metrics = {
            **results_of(name_losses_of_sources(result.metrics, self.prepared.train.source_names)),
            **shares_of_sources(columns, self.prepared.train.source_names),
            **self._count_samples(number, batch.answers),
            **self.prepared.progress_of(self.position),
        }
        if self.student is not None and sampled:
            self.student.check(number, metrics)
        self._idle.look(number, metrics, lambda: explain_idle_objective(columns, self.prepared.assembly.objective))
        return StepDone(metrics, {**result.cpu_seconds, **self._spans.drain()})

    def plan_step(self) -> Plan:
        """Return the plan of the next step on rows, with every column that the objective reads, and leave the step to be taken."""
        return self.complete(self._take_next().plan)

    def _take_next(self) -> PlannedBatch:
        return self._plan_next() if self._ahead is None else self._ahead.result()

    def _is_sampled(self, number: int) -> bool:
        return self.student is not None and self.student.is_due(number)

    def _plan_student_answers(self, number: int) -> PlannedBatch:
        """Read the mini-batch at `position`, and cut it with the student's answers in the place of its own."""
        assert self.student is not None, "somebody samples"
        with self._spans("data"):
            rows, after = self.prepared.read(self.position)
        with self._spans("generate"):
            answers = self.student.answer(rows, number)
        return PlannedBatch(self.engine.plan(answers.columns), after, answers)

    def _count_samples(self, number: int, answers: SampledAnswers | None) -> dict[str, float]:
        """Count steps and answers that were sampled; nothing where the run samples none."""
        if self.student is None:
            return {}
        counted = {"sampling/step": float(answers is not None), "sampling/steps": float(self.student.count_steps(number))}
        if answers is None:
            return counted
        sampled = int(np.count_nonzero(answers.columns.loss_weight))
        of_answers = {"mean_tokens": sampled / max(1, answers.count), "truncated": answers.truncated / max(1, answers.count)}
        return {**counted, **{f"sampling/{name}": value for name, value in of_answers.items()}}

    def _plan_next(self) -> PlannedBatch:
        """Read and cut the mini-batch at `position`. Raises what its data and the collator raise."""
        with self._spans("data"):
            columns, after = self.prepared.read(self.position)
        skip = self.prepared.resolved.config.training.skip_zero_gradients
        return PlannedBatch(self.engine.plan(columns, skip_zero_gradients=skip), after)

    def _plan_and_place(self) -> PlannedBatch:
        batch = self._plan_next()
        if not self.asks_ranks:
            self.engine.place(batch.plan)
        return batch

    def _plan_ahead(self) -> None:
        """Plan the next mini-batch and keep it, or its error, for its step; the loss of the ranks is raised at once."""
        self._ahead = Future(self._plan_and_place)
        try:
            self._ahead.result()
        except Exception:  # the future keeps it, and raises it in the step whose mini-batch it is
            if self.engine.ended is not None:
                raise

    def evaluate(self) -> Mapping[str, float] | None:
        """The loss of the held-out data, if there is any."""
        dataset = self.prepared.evaluation
        if dataset is None:
            return None
        size = self.prepared.order.batch_size
        return evaluate(self.engine, dataset, batch_size=size, planned=self._plan_whole, over=self.mean_over, watch=self.watch)

    def _plan_whole(self, columns: SampleColumns) -> Plan:
        return self.complete(self.engine.plan(columns))

    def state(self) -> Mapping[str, Any]:
        """The place in the sample order."""
        return SftState.create(self.name, self.engine.step, self.position, self.prepared.order, self.data).document()
