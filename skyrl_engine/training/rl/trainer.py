"""The steps of reinforcement learning: groups, what they were worth, passes over them, and the weights that come of it."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from skyrl_engine.contracts.kinds.advantage import REWARD_PARTS, Advantage, AdvantageBatch, AdvantageOutput, as_advantage_output
from skyrl_engine.contracts.kinds.needs import TEACHER_MODEL
from skyrl_engine.contracts.kinds.observer import RolloutsFinished
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import Metric, combine_metrics, results_of
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.contracts.values.source_names import SOURCE
from skyrl_engine.engine.batch_shape import BatchShape
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.engine.results import COUNTED, means_over
from skyrl_engine.objective.policy_metrics import ROLLOUT_LOGPROBS, WEIGHTS, effective_share
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame
from skyrl_engine.rollout.background_source import SamplingStatus
from skyrl_engine.rollout.columns import collect_learned, to_columns
from skyrl_engine.rollout.env_pool import count_workers
from skyrl_engine.rollout.group_source import GroupSource
from skyrl_engine.rollout.guard import SamplerGuard
from skyrl_engine.rollout.journal import Journal
from skyrl_engine.rollout.offline_source import Recording
from skyrl_engine.rollout.request_queue import CompletionSource
from skyrl_engine.rollout.runner import Episodes
from skyrl_engine.run.log import tell
from skyrl_engine.spans import Phases
from skyrl_engine.training.idle import IdleSteps, Reason, explain_idle_objective, explain_idle_rollouts, warn_of_cuts
from skyrl_engine.training.loop import StepDone
from skyrl_engine.training.moving_reference import MovingReference
from skyrl_engine.training.reference import REFERENCE, REFERENCE_MODEL
from skyrl_engine.training.rl.batches import group_sizes, mini_batch_size, shuffle_groups
from skyrl_engine.training.rl.entropy_control import COEFFICIENT, EntropyControl
from skyrl_engine.training.rl.entropy_ranks import ENTROPY_QUANTILE, rank_among_scored
from skyrl_engine.training.rl.evaluation import attempts, evaluation_metrics, tasks_of
from skyrl_engine.training.rl.kl_penalty import KlPenalty
from skyrl_engine.training.rl.metrics import rollout_metrics, staleness_metrics
from skyrl_engine.training.rl.pairs import PairedAttempts, choose_pairs
from skyrl_engine.training.rl.prepared import LiveRolloutSpec, PreparedRl
from skyrl_engine.training.rl.reward_model import add_rewards, value_metrics
from skyrl_engine.training.rl.reward_parts import parts_by_sample, parts_in
from skyrl_engine.training.rl.state import RlState
from skyrl_engine.training.rl.waiting import EnvironmentWaits
from skyrl_engine.training.source_metrics import name_losses_of_sources, shares_of_sources
from skyrl_engine.training.teacher import TEACHER, teacher_metrics

_OF_RANKS: Final = frozenset({"generate", "score", "train", "publish"})
"""Phases whose CPU seconds the ranks tell themselves."""


logger = logging.getLogger(__name__)


@frozen(eq=False)
class Live:
    """The sampling side of a run: tasks, the guard over the sampler's weights, and the journal that groups are written to.

    `sampler` and `episodes` are for evaluations. `status` counts what sampling and training wait for, where they go on side by side.
    """

    rollouts: LiveRolloutSpec
    sampler: CompletionSource
    episodes: Episodes
    guard: SamplerGuard
    journal: Journal
    status: SamplingStatus | None = None


@frozen(eq=False)
class ScoredBatch:
    """The groups of a step as `columns` of samples, and their `plan` with scores, rewards and advantages; `metrics` of these.

    `attempts` are all that the groups have. Where pairs of them are trained on, `columns` are those of `paired`, and `advantages` 1 and -1.
    """

    columns: SampleColumns
    plan: Plan
    advantages: AdvantageOutput
    metrics: Mapping[str, Metric]
    attempts: SampleColumns
    paired: PairedAttempts | None


@define(eq=False)
class RlTrainer:
    """The steps of reinforcement learning: each trains the weights of version t - 1 into those of version t.

    `live` is None where rollouts were recorded before. `on_rollouts` is called with each step's rollouts before training. `phases` are shared
    with the source of groups, which counts its own.
    """

    prepared: PreparedRl
    engine: Engine
    source: GroupSource
    live: Live | None
    penalty: KlPenalty | None
    reference: MovingReference | None
    on_rollouts: Callable[[RolloutsFinished], None]
    phases: Phases
    control: EntropyControl | None = None
    _idle: IdleSteps = field(init=False)
    _has_told: bool = field(default=False, init=False)
    _waits: EnvironmentWaits = field(init=False)
    _cpu: dict[str, float] = field(factory=dict, init=False)

    @_waits.default
    def _none_waited_for(self) -> EnvironmentWaits:
        return EnvironmentWaits(count_workers(self.prepared.resolved.config.rollouts.workers))

    @_idle.default
    def _none_yet(self) -> IdleSteps:
        return IdleSteps(self.prepared.resolved.config.rl.max_idle_steps)

    def restore(self, state: RlState) -> None:
        """Go on from what a checkpoint says."""
        self._idle.count = state.idle
        if self.live is not None:
            self.live.guard.above = state.above
        if self.penalty is not None and state.kl_coef is not None:
            self.penalty.coef = state.kl_coef
        if self.control is not None and state.entropy_coef is not None:
            self.control.coef, self.control.entropy = state.entropy_coef, state.entropy

    def step(self, number: int) -> StepDone:
        """One batch of rollouts: wait for it, score it, estimate advantages, train on it, and hand the new weights to the sampler."""
        config = self.prepared.resolved.config
        began = time.perf_counter()
        self._cpu = {}
        self.phases.wall.drain()
        self.phases.cpu.drain()
        with self.phases("prepare"):
            taken = self.source.take(number)
        self.on_rollouts(RolloutsFinished(number, taken.groups, tuple(group for group in taken.ended if group.dropped is not None)))
        batch = self.score_batch(taken.groups, number)
        columns, plan, metrics = batch.columns, batch.plan, dict(batch.metrics)
        with self.phases("train"):
            learned, present = self._learn(plan, number)
        if self.control is not None:
            metrics[COEFFICIENT] = Metric.mean(self.control.coef, 1)
        with self.phases("publish"):
            before = plan.columns.columns["old_logprobs"] if "old_logprobs" in self.prepared.scoring.scores else present
            self.source.finish_step(
                number, taken.groups, collect_learned(taken.groups, columns, batch.advantages.advantages, before)
            )
            if self.reference is not None:
                self.reference.refresh(number)
            self.source.publish(number)
        reported = {
            **results_of({**name_losses_of_sources(learned, self._source_names), **metrics}),
            **shares_of_sources(columns, self._source_names),
            **rollout_metrics(
                taken.groups,
                taken.ended,
                self.prepared.names,
                truncated=config.rl.truncated,
                overlong=self.prepared.overlong,
                missing_eos_penalty=config.rl.missing_eos_penalty,
            ),
            **value_metrics(taken.groups),
            **({} if batch.paired is None else batch.paired.metrics),
        }
        if self.live is not None and self.live.status is not None:
            reported |= staleness_metrics(taken.groups, number - 1, self.live.status)
        spent = self._finish(reported, taken.groups, began)
        ended = sum(len(group.trajectories) for group in taken.ended)
        if (
            self.live is not None
            and (waits := self._waits.describe(spent, reported, time.perf_counter() - began, ended)) is not None
        ):
            tell(logger, waits)
        # with the sampler's own log-probabilities as the old ones, later optimizer steps move away from them
        one_step = config.rl.mini_batches * config.rl.epochs == 1
        if self.live is not None and "policy/gap_mean" in reported and (one_step or self.prepared.scoring.old != "rollout"):
            self.live.guard.look(reported["policy/gap_mean"], number - 1, self._gap_to_first(plan.columns))
        if number == 1:
            tried = [attempt for group in taken.ended for attempt in group.finished]
            warn_of_cuts(sum(attempt.status == "truncated" for attempt in tried), len(tried), config.rl.max_tokens)
        ends = self._idle.look(number, reported, lambda: self._explain_idle(batch))
        return StepDone(reported, self._cpu, ends, spent)

    def score_batch(self, groups: Sequence[Group], number: int, *, whole: bool = False) -> "ScoredBatch":
        """Lay out the groups of step `number`, and add all that a pass needs to learn from them: scores and advantages.

        `whole` makes one mini-batch of them. Raises what the advantage estimator raises.
        """
        with self.phases("prepare"):
            columns = attempts = self._columns(groups, number)
        advantages: AdvantageOutput | None = None
        paired: PairedAttempts | None = None
        metrics: dict[str, Metric] = {}
        if (pairs := self.prepared.resolved.config.rl.pairs) is not None:
            with self.phases("advantage"):
                paired = choose_pairs(attempts, advantage_batch(attempts, ()).trajectory_rewards(), pairs)
                columns, advantages = paired.columns, AdvantageOutput(paired.signs)
        elif self._needs_no_scores(columns):
            # before the plan, so that it sets attempts apart that teach nothing, and every pass sees the same rows
            with self.phases("advantage"):
                advantages = self._advantages(columns)
                columns = columns.with_columns(columns_of(advantages))
        with self.phases("prepare"):
            plan = self._plan(columns, whole=whole)
        with self.phases("score"):
            plan = self._score(plan)
        metrics |= teacher_metrics(plan.columns)
        if advantages is None:
            with self.phases("advantage"):
                if self.penalty is not None:
                    shaped, of_penalty = self.penalty.apply(plan.columns)
                    metrics |= of_penalty
                    plan = attrs.evolve(plan, columns=shaped)
                advantages = self._advantages(plan.columns)
                plan = plan.with_columns(columns_of(advantages))
        return ScoredBatch(columns, plan, advantages, {**metrics, **advantages.metrics}, attempts, paired)

    def _explain_idle(self, batch: "ScoredBatch") -> Reason:
        """Say why nothing is learned from a batch."""
        prepared, settings = self.prepared, self.prepared.resolved.config.rl
        if batch.paired is not None and len(batch.paired.margins):
            return explain_idle_objective(batch.columns, prepared.assembly.objective)
        return explain_idle_rollouts(
            batch.attempts,
            batch.advantages.advantages if batch.paired is None else np.zeros(len(batch.attempts.loss_weight), dtype=np.float32),
            prepared.assembly.objective,
            truncated=settings.truncated,
            max_tokens=settings.max_tokens,
            estimator=None if prepared.advantage is None else prepared.advantage.label,
            filtered=bool(prepared.filters),
        )

    def evaluate(self) -> Mapping[str, float] | None:
        """Rewards and successes on held-out tasks, if there are any."""
        if self.live is None:
            return None
        config = self.prepared.resolved.config
        environments = self.live.rollouts.tasks.environments
        tasks = tasks_of(environments, config.evaluation.tasks)
        if not tasks:
            return None
        attempt_tasks = partial(
            attempts,
            tasks,
            config.evaluation,
            sampler=self.live.sampler,
            episodes=self.live.episodes,
            turns=self.live.rollouts.renderer,
            names=self.prepared.names,
            environments=environments,
            limits=attrs.evolve(self.prepared.limits, all_may_fail=True),
            sampling=self.prepared.sampling,
            seed=config.run.seed,
        )
        groups = self.source.at_rest(attempt_tasks)
        groups = list(add_rewards(self.prepared.reward_models, self.engine, groups))
        return evaluation_metrics(groups, self.prepared.names, seed=config.run.seed)

    def state(self) -> Mapping[str, Any]:
        """Return how far the source of groups is, and what is steered from step to step."""
        return self.source.at_rest(self._read_state)

    def _read_state(self) -> Mapping[str, Any]:
        return RlState(
            "rl",
            self.source.step,
            self.source.state(),
            None if self.penalty is None else self.penalty.coef,
            0 if self.live is None else self.live.guard.above,
            None if self.reference is None else self.reference.copied,
            self.prepared.environment_versions,
            None if self.live is None else self.live.journal.run,
            None if self.live is None else self.live.journal.listing(),
            self._idle.count,
            *((None, None) if self.control is None else (self.control.coef, self.control.entropy)),
        ).document()

    def _columns(self, groups: Sequence[Group], number: int) -> SampleColumns:
        config = self.prepared.resolved.config.rl
        columns = to_columns(
            groups,
            environments=self.prepared.names,
            version=number - 1,
            truncated=config.truncated,
            overlong=self.prepared.overlong,
            missing_eos_penalty=config.missing_eos_penalty,
            versions=config.staleness > 0,
        )
        rollouts = self.prepared.rollouts
        if isinstance(rollouts, Recording) and not rollouts.has_logprobs:
            known = {name: values for name, values in columns.columns.items() if name != ROLLOUT_LOGPROBS}
            columns = attrs.evolve(columns, columns=known)
        if self.prepared.advantage is not None and REWARD_PARTS in self.prepared.advantage.product.needs:
            attempts_of_groups = [attempt for group in groups for attempt in group.finished]
            added = {model.name for model in self.prepared.reward_models}
            parts = parts_by_sample(columns, attempts_of_groups, added)
            columns = attrs.evolve(columns, sample_values={**columns.sample_values, **parts})
        if self._source_names:
            values = columns.sample_values
            columns = attrs.evolve(columns, sample_values={**values, SOURCE: values["environment"]})
        return columns

    def _plan(self, columns: SampleColumns, *, whole: bool = False) -> Plan:
        settings = self.prepared.resolved.config.rl
        size = mini_batch_size(group_sizes(columns), 1 if whole else settings.mini_batches)
        plan = self.engine.plan(columns, mini_batch_size=size, skip_zero_gradients=settings.skip_zero_gradients)
        if not self._has_told:
            self._has_told = True
            tell(logger, f"first batch: {BatchShape.of(plan.cut, len(columns.input_ids))}")
        return plan

    @property
    def _source_names(self) -> Sequence[str]:
        """Return the names of the environments, where there are several."""
        return self.prepared.names if len(self.prepared.names) > 1 else ()

    def _score(self, plan: Plan) -> Plan:
        """Add what the model, the reference and the teacher say of the batch before it is learned from."""
        recipe, temperature = self.prepared.scoring, self.prepared.resolved.config.rl.temperature
        scores: dict[str, Any] = {}
        if recipe.scores:
            output = self.engine.score(plan, scores=set(recipe.scores.values()), temperature=temperature).result()
            scores = {column: output.on_actions(score) for column, score in recipe.scores.items()}
            if ENTROPY_QUANTILE in scores:
                scores[ENTROPY_QUANTILE] = rank_among_scored(scores[ENTROPY_QUANTILE].values, plan.columns.loss_weight != 0)
        if recipe.old == "rollout":
            scores["old_logprobs"] = plan.columns.columns["rollout_logprobs"]
        if recipe.reference:
            output = self.engine.score(plan, temperature=temperature, model=REFERENCE_MODEL).result()
            scores[REFERENCE] = output.on_actions("logprobs")
        if recipe.teacher and self.prepared.endpoint is not None:
            scores |= self.prepared.endpoint.score(plan.columns)
        elif recipe.teacher:
            output = self.engine.score(plan, temperature=temperature, model=TEACHER_MODEL).result()
            scores[TEACHER] = output.on_actions("logprobs")
        return plan.with_columns(scores)

    def _needs_no_scores(self, columns: SampleColumns) -> bool:
        """Say whether advantages can be estimated before any model scored the batch."""
        assert self.prepared.advantage is not None, "without pairs there is one"
        needs = {*self.prepared.advantage.product.needs} - {REWARD_PARTS}
        return self.penalty is None and needs <= columns.columns.keys()

    def _advantages(self, columns: SampleColumns) -> AdvantageOutput:
        assert self.prepared.advantage is not None, "without pairs there is one"
        return estimate_advantages(self.prepared.advantage, columns)

    def _gap_to_first(self, columns: SampleColumns) -> float | None:
        """Return the distance of the sampler's log-probabilities from the initial weights', in nats per token; None without a reference that
        holds these.
        """
        reference, available = self.prepared.resolved.config.reference, columns.columns
        if (
            not {REFERENCE, "rollout_logprobs"} <= available.keys()
            or reference.path is not None
            or reference.refresh_every is not None
        ):
            return None
        distances = np.abs(available[REFERENCE].astype(np.float64) - available["rollout_logprobs"])[columns.loss_weight != 0]
        return float(distances.mean()) if len(distances) else None

    def _learn(self, plan: Plan, number: int) -> tuple[dict[str, Metric], npt.NDArray[np.float32]]:
        """Take the optimizer steps of all epochs.

        Returns metrics of all of them together, and the log-probabilities of the first epoch's passes, float32[A].
        """
        config = self.prepared.resolved.config
        settings = config.rl
        parts: list[Mapping[str, Metric]] = []
        present = np.zeros(0, dtype=np.float32)
        for epoch in range(settings.epochs):
            epoch_plan = plan
            if epoch:
                order = shuffle_groups(plan.columns, seed=config.run.seed, step=number, epoch=epoch)
                epoch_plan = self._plan(plan.columns.take(order))
            measured = self.control is not None or (settings.entropy_metric and epoch == 0)
            watch = {*self.prepared.scoring.watch, *(("entropy",) if measured else ())}
            result = self.engine.train(
                epoch_plan,
                temperature=settings.temperature,
                per_token_outputs=epoch == 0,
                bound=self.prepared.scoring.bound,
                watch=watch,
                steering=self.control,
            )
            parts.append(result.metrics)
            if epoch == 0:
                present = result.output.on_actions("logprobs").values
            for span, seconds in result.cpu_seconds.items():
                self._cpu[span] = self._cpu.get(span, 0.0) + seconds
        # what is a sum within a step is a mean over optimizer steps, and so over epochs
        together = combine_metrics(parts)
        return {**means_over(together, settings.epochs), **{name: together[name] for name in COUNTED}}, present

    def _finish(self, reported: dict[str, float], groups: Sequence[Group], began: float) -> dict[str, float]:
        """Turn sums into what is reported, and return the wall seconds of every phase of the step that `began` then."""
        sums = [reported.pop(name) for name in WEIGHTS if name in reported]
        if sums:
            reported["policy/ess"] = effective_share(*sums)
        spent = self.phases.wall.drain()
        beside = self.live is not None and self.live.status is not None
        if (seconds := time.perf_counter() - began if beside else spent.get("generate", 0.0)) > 0:
            sampled = sum(len(attempt.logprobs) for group in groups for attempt in group.finished)
            reported["rollout/tokens_per_second"] = sampled / seconds
        for phase, seconds in self.phases.cpu.drain().items():
            if phase not in _OF_RANKS:
                self._cpu[phase] = self._cpu.get(phase, 0.0) + seconds
        return spent


def estimate_advantages(part: BoundPlugin[Advantage], columns: SampleColumns) -> AdvantageOutput:
    """Estimate the advantages of a batch. Raises PluginBrokenError and ResultError, naming the estimator."""
    batch = advantage_batch(columns, part.product.needs)
    with blame(part.owner, "its call"):
        estimate = part.product(batch)
    return as_advantage_output(part.label, estimate, batch, returns=part.product.claims.returns)


def columns_of(advantages: AdvantageOutput) -> dict[str, npt.NDArray[np.float32]]:
    returns = {} if advantages.returns is None else {"returns": advantages.returns}
    return {"advantages": advantages.advantages, **returns}


def advantage_batch(columns: SampleColumns, needs: Sequence[str]) -> AdvantageBatch:
    """Return what an estimator sees of a batch, read-only; attempts that failed are not in it."""
    return AdvantageBatch(
        rewards=_read_only(columns.columns["rewards"]),
        loss_weight=_read_only(columns.loss_weight),
        action_offsets=_read_only(columns.action_offsets),
        group_ids=_read_only(columns.group_ids),
        trajectory_ids=_read_only(columns.trajectory_ids),
        turn=_read_only(columns.sample_values["turn"].astype(np.int64)),
        finished=_read_only(np.ones(len(columns), dtype=np.bool_)),
        columns={name: _read_only(columns.columns[name]) for name in needs if name in columns.columns},
        parts=parts_in(columns) if REWARD_PARTS in needs else {},
    )


def _read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = values.view()
    view.setflags(write=False)
    return view
