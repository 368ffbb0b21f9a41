"""A step of a run by reinforcement, brought back: from the groups in its journal, or in the recording that it read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from attrs import define

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.rollout.arrow_codec import LearnedAttempt
from skyrl_engine.rollout.group_source import GroupSource, Result, StepBatch
from skyrl_engine.rollout.journal_index import JournalIndex, apply_decision, read_index
from skyrl_engine.rollout.offline_source import OfflineSource, Recording
from skyrl_engine.run.progress import LOADING
from skyrl_engine.spans import Phases
from skyrl_engine.training.replay.step import Past, Progress, RecordedStep, check_nothing, refuse_before_start
from skyrl_engine.training.rl.prepare import prepare
from skyrl_engine.training.rl.prepared import PreparedRl
from skyrl_engine.training.rl.reward_model import replace_rewards
from skyrl_engine.training.rl.run import list_permissions, load_frozen_models, make_trainer
from skyrl_engine.training.rl.state import RlState, state_in
from skyrl_engine.training.rl.trainer import columns_of, estimate_advantages


@define(eq=False)
class JournalSource:
    """Gives a trainer the groups that a run's journal says each step trained on, with the rewards that they had."""

    index: JournalIndex
    step: int

    def take(self, step: int) -> StepBatch:
        """Return the groups of a step, counted from 1."""
        groups = tuple(apply_decision(self.index.groups[ticket].group(), trained=True) for ticket in self.index.trained[step])
        return StepBatch(groups, groups)

    def finish_step(self, step: int, groups: Sequence[Group], learned: Sequence[LearnedAttempt]) -> None:  # noqa: ARG002 -- it was recorded
        """Take the end of a step."""
        self.step = step

    def publish(self, version: int) -> None:
        """Take it that there are new weights; nothing is sampled from them."""

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps."""
        return {"step": self.step}

    def at_rest(self, work: Callable[[], Result]) -> Result:
        """Do something now: nothing is sampled."""
        return work()


@contextmanager
def replay_rl(
    resolved: ResolvedConfig,
    past: Past,
    scratch: Path,
    *,
    progress: Progress | None = None,
    check: Callable[[Engine], None] = check_nothing,
) -> Iterator[RecordedStep]:
    """Bring a step back: groups are read again, and the steps since the checkpoint taken again.

    Raises CheckpointError where the journal no longer holds the groups of a step, or an environment is another than it was.
    """
    prepared = prepare(resolved)
    config, checkpoint = prepared.resolved.config, past.checkpoint
    state = None
    if checkpoint is not None:
        allowed = config.checkpoint.allow_changed
        permissions = list_permissions(prepared)
        state = state_in(checkpoint, prepared.environment_versions, permissions=permissions, allow_changed=allowed)
    if progress is not None:
        progress(LOADING, 0, 0)
    with Engine.launch(prepared.resolved, prepared.assembly, prepared.files, prepared.optimizer_steps, prepared.layout) as engine:
        if checkpoint is not None:
            engine.load(checkpoint.state)
        check(engine)
        reference = load_frozen_models(prepared, engine, past.link_references(scratch), state)
        source = _open_source(prepared, engine, past, state)
        trainer = make_trainer(prepared, engine, source, None, reference, state, lambda _: None, Phases())
        differences = past.take_steps(trainer.step, progress)
        batch = trainer.score_batch(source.take(past.step).groups, past.step, whole=True)
        columns = batch.plan.columns
        bound = dict(prepared.scoring.bound)
        if "old_logprobs" not in columns.columns:
            bound["old_logprobs"] = "logprobs"  # before its first update the policy is its own old one

        def with_advantage(selected: SelectedPlugin) -> Plan:
            if batch.paired is not None:
                raise UnsupportedError(
                    "the run trains on pairs of attempts (rl.pairs), of which no advantages are estimated",
                    remedy="Leave --advantage out, or compare objectives in a run without rl.pairs",
                )
            part = selected.bind("advantage", prepared.assembly.context)
            return batch.plan.with_columns(columns_of(estimate_advantages(part, columns)))

        temperature = config.rl.temperature
        yield RecordedStep(
            past.step, engine, batch.plan, bound, temperature, with_advantage, past.metrics[past.step], past.start, differences
        )


def _open_source(prepared: PreparedRl, engine: Engine, past: Past, state: RlState | None) -> GroupSource:
    """Return what gives the groups of every step from the checkpoint on. Raises CheckpointError where some are gone."""
    rollouts, models = prepared.rollouts, prepared.reward_models
    if isinstance(rollouts, Recording):
        valued = partial(replace_rewards, models, engine) if models else None
        seed = prepared.resolved.config.run.seed
        return OfflineSource(rollouts, prepared.resolved.config.rl.groups, seed, past.start, valued)
    index = read_index(past.directory.rollouts, None if state is None else state.segments)
    for number in range(past.start + 1, past.step + 1):
        tickets = index.trained.get(number)
        if tickets is None or any(ticket not in index.groups for ticket in tickets):
            refuse_before_start(
                past,
                f"the groups of step {number:,}",
                "rollouts.keep of groups, and checkpoint.every and checkpoint.keep of checkpoints",
            )
    return JournalSource(index, past.start)
