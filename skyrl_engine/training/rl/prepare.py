"""Everything of a run by reinforcement that can be decided before a rank starts."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.reading.origins import format_key
from skyrl_engine.config.reading.places import absent_places
from skyrl_engine.config.schema import EngineConfig, RlConfig
from skyrl_engine.contracts.kinds.advantage import Advantage
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.environment import Environment, Task
from skyrl_engine.contracts.kinds.generator import Sampling
from skyrl_engine.contracts.kinds.group_filter import GroupFilter
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.data.text.template_rule import uses_template
from skyrl_engine.engine.assembly import Assembly, assemble
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ConfigError, DataError, Problem, Refusals, UnsupportedError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.rollout.attempt import RolloutLimits
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.rollout.columns import Overlong
from skyrl_engine.rollout.offline_source import Recording, RecordingLimits, read_recording
from skyrl_engine.training.frozen_model_compat import check_models_beside
from skyrl_engine.training.reference import plan_reference, refuse_dropout, refuse_unread_reference
from skyrl_engine.training.rl.batches import mini_batch_size
from skyrl_engine.training.rl.contradictions import (
    refuse_beyond_positions,
    refuse_contradictions,
    refuse_generator,
    refuse_no_values,
    refuse_single_attempts,
    refuse_too_few,
)
from skyrl_engine.training.rl.evaluation import tasks_of
from skyrl_engine.training.rl.prompts import OF_TABLES, PromptLimits, check_prompts, most_of
from skyrl_engine.training.rl.reward_model import RewardModel
from skyrl_engine.training.rl.scoring import LogprobsAvailability, ScoringPasses, plan_scoring_passes
from skyrl_engine.training.rl.tasks import TaskOrder, refuse_no_task, task_at, tasks_in
from skyrl_engine.training.teacher import plan_teacher
from skyrl_engine.workers.dispatch import plan_batch

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Told what is being waited for, how much of it is there, and how much is wanted."""

_LOGPROBS: Final[Mapping[bool, LogprobsAvailability]] = {True: "with_logprobs", False: "without_logprobs"}


@frozen(eq=False)
class LiveRolloutSpec:
    """Rollouts that are to be sampled: tasks in their order, and what makes prompts of them.

    `longest_prompt` counts the tokens of the longest prompt among those of the first groups; 0 where nothing is trained.
    """

    tasks: TaskOrder
    renderer: ChatRenderer
    longest_prompt: int = 0


@frozen(eq=False)
class PreparedRl:
    """A run that is ready to start its ranks. `environments` are selected plugins in their order, and `names` what they are called.

    Where `rollouts` is a recording, there are no `environments`, and `names` are those that it was sampled with.
    """

    resolved: ResolvedConfig
    files: ModelFiles
    assembly: Assembly
    layout: Layout
    advantage: BoundPlugin[Advantage]
    filters: tuple[BoundPlugin[GroupFilter], ...]
    environments: tuple[SelectedPlugin, ...]
    names: tuple[str, ...]
    rollouts: "LiveRolloutSpec | Recording"
    scoring: ScoringPasses
    reference: FrozenModel | None
    teacher: FrozenModel | None
    reward_model: RewardModel | None

    @property
    def sampling(self) -> Sampling:
        """The distribution that attempts are sampled from, but for what an environment or the length says."""
        config = self.resolved.config.rl
        return Sampling(config.max_tokens, config.temperature, stop_strings=config.stop_strings)

    @property
    def overlong(self) -> Overlong | None:
        config = self.resolved.config.rl
        if config.overlong is None:
            return None
        return Overlong(config.overlong.start * config.max_tokens, config.max_tokens, config.overlong.penalty)

    @property
    def optimizer_steps(self) -> int:
        """Count the optimizer steps of the whole run."""
        config = self.resolved.config.rl
        return config.steps * config.mini_batches * config.epochs

    @property
    def limits(self) -> RolloutLimits:
        """The limits of every attempt."""
        config = self.resolved.config
        return RolloutLimits(
            group_size=config.rl.group_size,
            max_prompt_tokens=config.rl.max_prompt_tokens,
            max_tokens=config.rl.max_tokens,
            min_group_size=config.rollouts.fewest_finished(config.rl.group_size),
            max_failure_share=config.rollouts.max_failure_share,
            all_may_fail=config.rollouts.max_failure_share == 1,
            keeps_history=config.rl.history == "append",
        )

    @property
    def environment_versions(self) -> dict[str, str]:
        """The version of every environment by its name: what it says of itself, and its plugin's. A recording is known by its content."""
        if isinstance(self.rollouts, Recording):
            return {"rl.rollouts": self.rollouts.digest}
        versions = {}
        for name, selected, part in zip(self.names, self.environments, self.rollouts.tasks.environments, strict=True):
            record = selected.loaded.record
            versions[name] = f"{record.version or record.sha256} {part.product.claims.version}".strip()
        return versions


def prepare(resolved: ResolvedConfig, *, trains: bool = True, progress: Progress | None = None) -> PreparedRl:
    """Make the controller's plugins and tasks, or read a recording, and refuse what cannot work. Starts nothing and writes nothing.

    A run that only evaluates (`trains` is false) is not asked for what training alone needs.

    Raises ConfigError, UnsupportedError, DataError, ModelError, RolloutError, and what plugins raise.
    """
    config, settings, refusals = resolved.config, resolved.config.rl, Refusals()
    with refusals.collect():
        refuse_contradictions(resolved, trains=trains)
    files = ModelFiles.of(config.model)
    longest = settings.max_prompt_tokens + settings.max_tokens
    if trains:
        with refusals.collect():
            refuse_dropout(
                files.facts,
                "sampled and scored without it: ratios would not be 1, and the sampler would seem to hold other weights",
            )
    check_models_beside(resolved, refusals)
    assembly = None
    with refusals.collect():
        assembly = assemble(resolved, files, max_sequence_length=longest)
        assembly.check_data(files.facts, [])
    context = FactoryContext(config.run.seed, 0, longest) if assembly is None else assembly.context
    sampling = settings.rollouts is None
    with refusals.collect():
        if sampling:
            refuse_generator(resolved, trains=trains)
    with refusals.collect():
        if sampling:
            refuse_beyond_positions(resolved, files)
    environments = _at(resolved, "environments")
    parts = _environment_parts(environments, context, refusals, trains=trains) if sampling else []
    advantage: BoundPlugin[Advantage] | None = None
    filters: list[BoundPlugin[GroupFilter]] = []
    with refusals.collect():
        advantage = resolved.plugins["advantage"].bind("advantage", context)
        refuse_single_attempts(resolved, advantage)
    for number, each in enumerate(_at(resolved, "group_filters")):
        with refusals.collect():
            filters.append(each.bind(f"group_filters[{number}]", context))
    if assembly is None or advantage is None:
        refusals.raise_all()
    assert assembly is not None, "what hinders it was raised"
    assert advantage is not None, "what hinders it was raised"
    layout = assembly.layout(micro_batch_rows=settings.micro_batch_rows, micro_batch_tokens=settings.micro_batch_tokens)
    rollouts: LiveRolloutSpec | Recording | None = None
    with refusals.collect():
        if not sampling:
            rollouts = _prepare_offline(resolved, files, filters, advantage, progress)
        elif len(parts) == len(environments) > 0:
            rollouts = _prepare_live(resolved, files, parts, trains=trains)
    if trains or config.reward_model.path is not None:
        with refusals.collect():
            _plan_any_batch(assembly, layout, settings, rollouts)
    chosen = None
    with refusals.collect():
        recorded = _LOGPROBS[rollouts.has_logprobs] if isinstance(rollouts, Recording) else None
        chosen = plan_scoring_passes(settings, assembly.objective, advantage, recorded=recorded, reducer=assembly.reducer)
        refuse_no_values(config.model, advantage, chosen)
    reference = teacher = reward_model = None
    if chosen is not None:
        with refusals.collect():
            if chosen.reference:
                reference = plan_reference(resolved, assembly, files)
            elif trains:
                refuse_unread_reference(resolved)
        with refusals.collect():
            teacher = plan_teacher(
                resolved,
                assembly,
                files,
                read=chosen.teacher,
                longest=longest,
                shorter="Lower rl.max_prompt_tokens or rl.max_tokens",
            )
    with refusals.collect():
        reward_model = RewardModel.plan(resolved, assembly, files)
    refusals.raise_all()
    assert rollouts is not None, "what hinders it was raised"
    assert chosen is not None, "what hinders it was raised"
    if trains:
        for warning in _collect_warnings(settings, assembly):
            logger.warning("%s", warning)
    return PreparedRl(
        resolved=resolved,
        files=files,
        assembly=assembly,
        layout=layout,
        advantage=advantage,
        filters=tuple(filters),
        environments=environments,
        names=rollouts.names if isinstance(rollouts, Recording) else _names(environments),
        rollouts=rollouts,
        scoring=chosen,
        reference=reference,
        teacher=teacher,
        reward_model=reward_model,
    )


def _environment_parts(
    environments: Sequence[SelectedPlugin], context: FactoryContext, refusals: Refusals, *, trains: bool
) -> list[BoundPlugin[Environment]]:
    """Make the environments and read their tasks, each on its own; those that cannot are left out."""
    parts: list[BoundPlugin[Environment]] = []
    for number, each in enumerate(environments):
        made = len(parts)
        with refusals.collect():
            part: BoundPlugin[Environment] = each.bind(f"environments[{number}]", context)
            refuse_no_task(part, tasks_in(part, "train"), trains=trains)
            parts.append(part)
        if len(parts) == made:
            _refuse_absent_places(each, number, refusals)
    return parts


def _refuse_absent_places(environment: SelectedPlugin, number: int, refusals: Refusals) -> None:
    """Collect the files of an environment that are not there: making it stops at the first."""
    if environment.options is None:
        return
    for key, place in absent_places(environment.options, ("environments", number)):
        with refusals.collect():
            if not refusals.has_named(place):
                raise ConfigError([Problem(format_key(key), f"there is nothing at {place}", "Correct the path")])


def _plan_any_batch(assembly: Assembly, layout: Layout, settings: RlConfig, rollouts: LiveRolloutSpec | Recording | None) -> None:
    """Plan a batch of as many attempts as a step has, so that a collator that cannot cut as the run says is refused now.

    One attempt is as long as some are for certain: as the longest that was recorded, or the longest prompt and a token. Others are short, and
    longer ones may still be sampled. Raises what the collator raises.
    """
    size, least = settings.group_size, 2
    if isinstance(rollouts, Recording):
        size, least = rollouts.largest, max(least, rollouts.longest)
    elif rollouts is not None:
        least = max(least, rollouts.longest_prompt + 1)
    lengths = np.full(settings.groups * size, 2, dtype=np.int64)
    lengths[0] = least
    columns = SampleColumns.create(
        input_ids=np.zeros(int(lengths.sum()), dtype=np.int64),
        token_offsets=offsets_of(lengths),
        action_offsets=np.arange(len(lengths) + 1, dtype=np.int64),
        group_ids=np.repeat(np.arange(settings.groups, dtype=np.int64), size),
    )
    together = mini_batch_size([size] * settings.groups, settings.mini_batches)
    plan_batch(assembly.collator, columns, evolve(layout, mini_batch_size=together))


_REWARDED = frozenset(("rewards", "advantages", "returns"))
"""Columns by which a reward reaches the model."""


def _collect_warnings(settings: RlConfig, assembly: Assembly) -> Iterator[str]:
    """Tell what is allowed and hardly meant."""
    if _REWARDED.isdisjoint(name for needs in assembly.needs.values() for name in needs):
        yield (
            f"no part of the loss reads {', '.join(sorted(_REWARDED))}: all attempts are learned alike, whatever their reward. "
            "Choose a loss that reads advantages, such as ppo, unless a filter of groups chooses what is learned"
        )
    longest = settings.max_prompt_tokens + settings.max_tokens
    if settings.micro_batch_tokens is not None and settings.micro_batch_tokens < longest:
        yield (
            f"rl.micro_batch_tokens = {settings.micro_batch_tokens} holds no attempt of rl.max_prompt_tokens + rl.max_tokens = {longest} "
            "tokens: the run stops at the first that does not fit. Raise it, or lower one of these"
        )


def _prepare_live(
    resolved: ResolvedConfig, files: ModelFiles, parts: Sequence[BoundPlugin[Environment]], *, trains: bool
) -> LiveRolloutSpec:
    config = resolved.config
    tasks = TaskOrder(parts, [table.weight for table in config.environments], config.run.seed, trains=trains)
    template = config.model.chat_template
    named: dict[str, Any] = {} if template is None else {"name": f"the chat template {template}"}
    raw = not uses_template(files.tokenizer, config.rl.template)
    renderer = ChatRenderer(files.tokenizer, history=config.rl.history, raw=raw, **named)
    _prove_turns(renderer, parts, tasks)
    longest = 0
    if trains:
        refusals = Refusals()
        with refusals.collect():
            refuse_too_few(resolved, tasks)
        with refusals.collect():
            longest = check_prompts(parts, _first_tasks(config, tasks), renderer, limits_of(config, files.facts))
        with refusals.collect():
            _check_evaluation(config, parts, renderer, limits_of(config, files.facts))
        refusals.raise_all()
    return LiveRolloutSpec(tasks, renderer, longest)


def _check_evaluation(
    config: EngineConfig, parts: Sequence[BoundPlugin[Environment]], renderer: ChatRenderer, limits: PromptLimits
) -> None:
    """Check the held-out tasks that the run evaluates on. Raises ConfigError where it is to evaluate on none, and as `check_prompts` does."""
    asked = [key for key in ("every", "at_start") if getattr(config.evaluation, key) not in (None, False)]
    if not asked and not config.evaluation.at_end:
        return
    held_out = tasks_of(parts, config.evaluation.tasks)
    if asked and not held_out:
        raise ConfigError(
            [
                Problem(
                    f"evaluation.{key}",
                    "asks for evaluation, but no environment has a held-out task",
                    f"Remove evaluation.{key}, or hold tasks out: --eval-data, or eval_data or eval_fraction of an environment over a table",
                )
                for key in asked
            ]
        )
    check_prompts(parts, held_out, renderer, limits)


def limits_of(config: EngineConfig, facts: ModelFacts) -> PromptLimits:
    """Return what prompts of the run may be."""
    return PromptLimits(config.rl.max_prompt_tokens, facts.vocabulary_size, config.rollouts.max_failure_share)


def _first_tasks(config: EngineConfig, tasks: TaskOrder) -> Iterator[tuple[int, Task]]:
    """Yield the tasks that the first groups attempt."""
    most = [most_of(part) for part in tasks.environments]
    return tasks.first(min(config.rl.steps * config.rl.groups, OF_TABLES * len(most)), most)


def _prepare_offline(
    resolved: ResolvedConfig,
    files: ModelFiles,
    filters: Sequence[BoundPlugin[GroupFilter]],
    advantage: BoundPlugin[Advantage],
    progress: Progress | None,
) -> Recording:
    config, settings = resolved.config, resolved.config.rl
    assert settings.rollouts is not None, "that is why it is recorded"
    recording = read_recording(
        Path(settings.rollouts).expanduser(),
        RecordingLimits(files.facts.vocabulary_size, files.facts.extended_length, config.rollouts.fewest_finished),
        filters,
        max_drop_share=config.rollouts.max_drop_share,
        on_starved=config.rollouts.on_starved,
        told=None if progress is None else lambda groups: progress("groups that are read", groups, groups),
    )
    if recording.largest == 1 and advantage.product.claims.groups == "needed":
        raise UnsupportedError(
            f"{advantage.label} compares attempts at one task, and no task of {recording.place} has two: every advantage would be 0",
            remedy="Record groups of several attempts, or choose an advantage without groups, such as gae or reinforce_pp",
        )
    needed, there = settings.steps * settings.groups, len(recording.groups)
    if not settings.repeat_tasks and needed > there:
        raise DataError(
            f"{recording.place} has {there:,} groups to train on, and {settings.steps} steps of {settings.groups} take {needed:,}",
            remedy="Set rl.repeat_tasks = true, or lower rl.steps",
        )
    return recording


def _at(resolved: ResolvedConfig, key: str) -> tuple[SelectedPlugin, ...]:
    """Return the plugins of a list of the configuration, in its order."""
    count = len(getattr(resolved.config, key))
    return tuple(resolved.plugins[f"{key}[{number}]"] for number in range(count))


def _names(environments: Sequence[SelectedPlugin]) -> tuple[str, ...]:
    """Name environments after their plugins; of several of one plugin each has its number."""
    names = [each.loaded.record.name for each in environments]
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name}_{names[: number + 1].count(name)}" for number, name in enumerate(names))


def _prove_turns(renderer: ChatRenderer, parts: Sequence[BoundPlugin[Environment]], tasks: TaskOrder) -> None:
    """Prove that later turns can be appended where there are any, with the first task of every environment."""
    for part, trained in zip(parts, tasks.tasks, strict=True):
        # an evaluation may be of held-out tasks alone
        own = trained if len(trained) else tasks_in(part, "eval")
        if not len(own):
            continue
        task = task_at(part, own, 0)
        if part.product.claims.max_turns > 1:
            if task.prompt_ids and renderer.history == "template":
                raise UnsupportedError(
                    f'{part.label} gives its prompts as tokens, and rl.history = "template" renders them anew from messages',
                    remedy='Set rl.history = "append"',
                )
            roles = ("tool",) if task.tools else ("user",)
            for warning in renderer.validate_template(roles, task.tools):
                logger.warning("%s", warning)
        elif task.messages:
            renderer.require_tools(task.tools)
