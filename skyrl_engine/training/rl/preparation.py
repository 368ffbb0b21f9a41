"""Everything of a run by reinforcement that can be decided before a rank starts."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.schema import EngineConfig, RlConfig
from skyrl_engine.contracts.kinds.advantage import Advantage
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.environment import Environment, Task
from skyrl_engine.contracts.kinds.generator import Sampling
from skyrl_engine.contracts.kinds.group_filter import GroupFilter
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.data.text.template_rule import uses_template
from skyrl_engine.engine.assembly import Assembly, assemble
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.engine.sampler import refuse_elsewhere
from skyrl_engine.errors import ConfigError, DataError, Problem, UnsupportedError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.registry.part import Part
from skyrl_engine.rollout.columns import Overlong
from skyrl_engine.rollout.recorded import Recording, RecordingLimits, read_recording
from skyrl_engine.rollout.runner import Bounds
from skyrl_engine.rollout.turns import TurnRenderer
from skyrl_engine.training.reference import planned_reference, refuse_dropout
from skyrl_engine.training.rl.evaluation import tasks_of
from skyrl_engine.training.rl.prompts import OF_TABLES, PromptLimits, check_prompts, most_of
from skyrl_engine.training.rl.recipe import Recipe, Recorded, recipe
from skyrl_engine.training.rl.reward_model import RewardModel
from skyrl_engine.training.rl.tasks import TaskOrder, task_at, tasks_in
from skyrl_engine.training.teacher import planned_teacher

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Told what is being waited for, how much of it is there, and how much is wanted."""

_LOGPROBS: Final[Mapping[bool, Recorded]] = {True: "with_logprobs", False: "without_logprobs"}


@frozen(eq=False)
class Sampled:
    """Rollouts that are to be sampled: tasks in their order, and what makes prompts of them."""

    tasks: TaskOrder
    renderer: TurnRenderer


@frozen(eq=False)
class PreparedRl:
    """A run that is ready to start its ranks. `environments` are selected plugins in their order, and `names` what they are called.

    Where `rollouts` is a recording, there are no `environments`, and `names` are those that it was sampled with.
    """

    resolved: ResolvedConfig
    files: ModelFiles
    assembly: Assembly
    layout: Layout
    advantage: Part[Advantage]
    filters: tuple[Part[GroupFilter], ...]
    environments: tuple[SelectedPlugin, ...]
    names: tuple[str, ...]
    rollouts: "Sampled | Recording"
    recipe: Recipe
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
    def bounds(self) -> Bounds:
        """The limits of every attempt."""
        config = self.resolved.config
        return Bounds(
            group_size=config.rl.group_size,
            max_prompt_tokens=config.rl.max_prompt_tokens,
            max_tokens=config.rl.max_tokens,
            min_group_size=min(config.rollouts.min_group_size, config.rl.group_size),
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
    config = resolved.config
    settings = config.rl
    _refuse_contradictions(resolved)
    files = ModelFiles.of(config.model)
    if trains:
        refuse_dropout(
            files.facts, "sampled and scored without it: ratios would not be 1, and the sampler would seem to hold other weights"
        )
    assembly = assemble(resolved, files, max_sequence_length=settings.max_prompt_tokens + settings.max_tokens)
    assembly.check_data(files.facts, [])
    context = assembly.context
    advantage: Part[Advantage] = resolved.plugins["advantage"].part("advantage", context)
    if settings.rollouts is None and settings.group_size == 1 and advantage.product.claims.groups == "needed":
        raise UnsupportedError(
            f"{advantage.label} compares attempts at one task, and rl.group_size is 1: every advantage would be 0",
            remedy="Raise rl.group_size, or choose an advantage without groups, such as gae or reinforce_pp",
        )
    filters: tuple[Part[GroupFilter], ...] = tuple(
        each.part(f"group_filters[{number}]", context) for number, each in enumerate(_at(resolved, "group_filters"))
    )
    environments = _at(resolved, "environments")
    rollouts: Sampled | Recording
    if settings.rollouts is None:
        rollouts, recorded = _sampled(resolved, files, environments, context, trains=trains), None
    else:
        rollouts = _recorded(resolved, files, filters, advantage, progress)
        recorded = _LOGPROBS[rollouts.has_logprobs]
    chosen = recipe(settings, assembly.objective, advantage, recorded=recorded, reducer=assembly.reducer)
    if "values" in chosen.scores.values() and not config.model.value_head:
        raise UnsupportedError(
            f"{advantage.label} needs old_values, and the model has no value head",
            remedy="Set model.value_head = true, or choose an advantage without values, such as grpo or reinforce_pp",
        )
    if trains:
        for warning in _doubts(settings, assembly):
            logger.warning("%s", warning)
    return PreparedRl(
        resolved=resolved,
        files=files,
        assembly=assembly,
        layout=assembly.layout(micro_batch_rows=settings.micro_batch_rows, micro_batch_tokens=settings.micro_batch_tokens),
        advantage=advantage,
        filters=filters,
        environments=environments,
        names=rollouts.names if isinstance(rollouts, Recording) else _names(environments),
        rollouts=rollouts,
        recipe=chosen,
        reference=planned_reference(resolved, assembly, files) if chosen.reference else None,
        teacher=planned_teacher(
            resolved,
            assembly,
            files,
            read=chosen.teacher,
            longest=settings.max_prompt_tokens + settings.max_tokens,
            shorter="Lower rl.max_prompt_tokens or rl.max_tokens",
        ),
        reward_model=RewardModel.planned(resolved, assembly, files),
    )


_REWARDED = frozenset(("rewards", "advantages", "returns"))
"""Columns by which a reward reaches the model."""


def _doubts(settings: RlConfig, assembly: Assembly) -> Iterator[str]:
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


def _sampled(
    resolved: ResolvedConfig, files: ModelFiles, environments: Sequence[SelectedPlugin], context: FactoryContext, *, trains: bool
) -> Sampled:
    config = resolved.config
    _refuse_generator(resolved, trains=trains)
    _refuse_beyond_positions(resolved, files)
    parts: list[Part[Environment]] = [each.part(f"environments[{number}]", context) for number, each in enumerate(environments)]
    tasks = TaskOrder(parts, [table.weight for table in config.environments], config.run.seed, trains=trains)
    template = config.model.chat_template
    named: dict[str, Any] = {} if template is None else {"name": f"the chat template {template}"}
    raw = not uses_template(files.tokenizer, config.rl.template)
    renderer = TurnRenderer(files.tokenizer, history=config.rl.history, raw=raw, **named)
    _prove_turns(renderer, parts, tasks)
    if trains:
        _refuse_too_few(resolved, tasks)
        check_prompts(parts, _attempted(config, tasks), renderer, limits_of(config, files.facts))
        if config.evaluation.every is not None or config.evaluation.at_start or config.evaluation.at_end:
            check_prompts(parts, tasks_of(parts, config.evaluation.tasks), renderer, limits_of(config, files.facts))
    return Sampled(tasks, renderer)


def limits_of(config: EngineConfig, facts: ModelFacts) -> PromptLimits:
    """Return what prompts of the run may be."""
    return PromptLimits(config.rl.max_prompt_tokens, facts.vocabulary_size, config.rollouts.max_failure_share)


def _attempted(config: EngineConfig, tasks: TaskOrder) -> Iterator[tuple[int, Task]]:
    """Yield the tasks that the first groups attempt."""
    most = [most_of(part) for part in tasks.environments]
    return tasks.first(min(config.rl.steps * config.rl.groups, OF_TABLES * len(most)), most)


def _recorded(
    resolved: ResolvedConfig,
    files: ModelFiles,
    filters: Sequence[Part[GroupFilter]],
    advantage: Part[Advantage],
    progress: Progress | None,
) -> Recording:
    config, settings = resolved.config, resolved.config.rl
    assert settings.rollouts is not None, "that is why it is recorded"
    recording = read_recording(
        Path(settings.rollouts).expanduser(),
        RecordingLimits(files.facts.vocabulary_size, files.facts.extended_length, config.rollouts.min_group_size),
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


def _refuse_contradictions(resolved: ResolvedConfig) -> None:
    settings = resolved.config.rl
    problems = []
    if settings.rollouts is not None:
        problems += _refuse_sampling(resolved)
    elif not resolved.config.environments:
        problems.append(
            Problem("environments", "there is no environment", 'Add [[environments]] with use = "...", or give --env or --reward')
        )
    if resolved.config.reference.precompute:
        problems.append(
            Problem(
                "reference.precompute", "rollouts are sampled anew in every step, so nothing is there to score before", "Remove it"
            )
        )
    if settings.mini_batches > settings.groups:
        problems.append(
            Problem(
                "rl.mini_batches",
                f"is {settings.mini_batches}, and a batch has {settings.groups} groups, which are never cut",
                "Lower rl.mini_batches or raise rl.groups",
            )
        )
    if settings.micro_batch_rows is not None and settings.micro_batch_tokens is not None:
        problems.append(
            Problem(
                "rl.micro_batch_tokens",
                "rl.micro_batch_rows is set too",
                "Give one of rl.micro_batch_rows and rl.micro_batch_tokens",
            )
        )
    if problems:
        raise ConfigError(problems)


def _refuse_sampling(resolved: ResolvedConfig) -> list[Problem]:
    """Return the problems of keys that ask for what nobody does where rollouts are recorded."""
    config = resolved.config
    asked = {
        "environments": bool(config.environments),
        "evaluation.every": config.evaluation.every is not None,
        "evaluation.at_start": config.evaluation.at_start,
    }
    return [
        Problem(key, "rl.rollouts is set, so that nothing is sampled and no environment answers", f"Remove {key}, or rl.rollouts")
        for key, given in asked.items()
        if given
    ]


def _refuse_generator(resolved: ResolvedConfig, *, trains: bool) -> None:
    """Refuse a generator that does not run on ranks, and one that nothing can be trained with."""
    plugin = resolved.plugins["generator"]
    label, description = str(plugin.loaded.record), plugin.loaded.describe_generator(plugin.options)
    refuse_elsewhere(label, description)
    if resolved.config.rl.stop_strings and "stop_strings" not in description.capabilities:
        raise UnsupportedError(
            f"rl.stop_strings is set, and {label} does not declare the capability 'stop_strings'",
            remedy="Remove rl.stop_strings, or choose a generator that stops at texts, such as hf",
        )
    if not trains:
        return
    if not description.accepts and "recorded" not in description.capabilities:
        raise UnsupportedError(
            f"{label} takes no weights: it would go on sampling from a model that is not the trained one",
            remedy="Choose a generator that takes weights, such as hf",
        )
    if "logprobs" not in description.capabilities:
        raise UnsupportedError(
            f"{label} does not declare the capability 'logprobs': nobody could tell whether it samples from the trained model",
            remedy="Choose a generator that gives the log-probabilities of what it samples, such as hf",
        )


def _refuse_beyond_positions(resolved: ResolvedConfig, files: ModelFiles) -> None:
    settings = resolved.config.rl
    longest, positions = settings.max_prompt_tokens + settings.max_tokens, files.facts.extended_length
    if positions is not None and longest > positions:
        raise UnsupportedError(
            f"rl.max_prompt_tokens and rl.max_tokens make attempts of up to {longest:,} tokens, and the model has {positions:,} positions",
            remedy="Lower one of them",
        )


def _refuse_too_few(resolved: ResolvedConfig, tasks: TaskOrder) -> None:
    settings = resolved.config.rl
    if settings.repeat_tasks:
        return
    for part, own, needed in zip(tasks.environments, tasks.tasks, tasks.needs(settings.steps * settings.groups), strict=True):
        if needed > len(own):
            raise DataError(
                f"{part.label} has {len(own):,} tasks, and {settings.steps} steps of {settings.groups} groups take {needed:,} of it",
                remedy="Set rl.repeat_tasks = true, or lower rl.steps",
            )


def _prove_turns(renderer: TurnRenderer, parts: Sequence[Part[Environment]], tasks: TaskOrder) -> None:
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
            for warning in renderer.prove(roles, task.tools):
                logger.warning("%s", warning)
        elif task.messages:
            renderer.require_tools(task.tools)
