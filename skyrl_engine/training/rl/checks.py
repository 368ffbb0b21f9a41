"""Checks of a run by reinforcement, each a function of the draft that raises what it finds. They run in the order of the two lists at the end:
`BEFORE_BUILDING` reads configuration and model, `AFTER_BUILDING` what was built.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import numpy as np
from attrs import evolve

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.automatic import budget_of, find_attempt_limit, find_prompt_limit
from skyrl_engine.config.schema import EngineConfig, GeneratorTable, RlConfig
from skyrl_engine.contracts.kinds.environment import Environment, Task
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.automatic import find_device, find_device_bytes
from skyrl_engine.errors import ConfigError, DataError, Problem, UnsupportedError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.memory import find_free_host_bytes, find_reason_against_turns
from skyrl_engine.model_facts.weight_files import count_parameters
from skyrl_engine.objective.policy_metrics import OLD_LOGPROBS, ROLLOUT_LOGPROBS
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.rollout.offline_source import Recording
from skyrl_engine.training.generator_compat import refuse_generator_of_other_weights, refuse_misplaced_generator
from skyrl_engine.training.reference import refuse_dropout, refuse_unread_reference
from skyrl_engine.training.rl.batches import mini_batch_size
from skyrl_engine.training.rl.entropy_control import EntropyControl
from skyrl_engine.training.rl.evaluation import tasks_of
from skyrl_engine.training.rl.pair_checks import list_pair_problems, refuse_losses_of_other_samples, refuse_recording_without_pairs
from skyrl_engine.training.rl.prepared import LiveRolloutSpec, RlDraft
from skyrl_engine.training.rl.prompts import OF_TABLES, PromptLimits, check_prompts, most_of
from skyrl_engine.training.rl.tasks import TaskOrder, task_at, tasks_in
from skyrl_engine.workers.dispatch import plan_batch

logger = logging.getLogger(__name__)

_REWARDED: Final = frozenset(("rewards", "advantages", "returns"))
"""Columns by which a reward reaches the model."""


def refuse_contradictions(draft: RlDraft) -> None:
    """Raise ConfigError with every key that contradicts another one; some do so only where the run trains."""
    resolved, trains = draft.resolved, draft.trains
    settings, fewest = resolved.config.rl, resolved.config.rollouts.min_group_size
    problems = []
    if settings.rollouts is not None:
        problems += _refuse_sampling(resolved)
    elif not resolved.config.environments:
        problems.append(
            Problem("environments", "there is no environment", 'Add [[environments]] with use = "...", or give --env or --reward')
        )
    if resolved.config.reference.precompute:
        problems.append(
            Problem("reference.precompute", "precomputing needs fixed data, and RL samples new rollouts in every step", "Remove it")
        )
    if trains and settings.rollouts is None and fewest is not None and fewest > settings.group_size:
        problems.append(
            Problem(
                "rollouts.min_group_size",
                f"is {fewest}, and a group has rl.group_size = {settings.group_size} attempts: every group would be dropped",
                "Lower rollouts.min_group_size, or raise rl.group_size",
            )
        )
    if trains:
        problems += list_pair_problems(settings)
    if settings.entropy is not None and settings.entropy.highest < settings.entropy.lowest:
        problems.append(
            Problem(
                "rl.entropy.highest",
                f"is {settings.entropy.highest}, and rl.entropy.lowest is {settings.entropy.lowest}",
                "Raise rl.entropy.highest, or lower rl.entropy.lowest",
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
    if settings.micro_batch_rows is not None and isinstance(settings.micro_batch_tokens, int):
        problems.append(
            Problem(
                "rl.micro_batch_tokens",
                "rl.micro_batch_rows is set too",
                "Give one of rl.micro_batch_rows and rl.micro_batch_tokens",
            )
        )
    if trains and settings.rollouts is None:
        problems += _refuse_beside(resolved)
    if problems:
        raise ConfigError(problems)


def _refuse_beside(resolved: ResolvedConfig) -> list[Problem]:
    """Return the problems of keys that only sampling beside training reads, where the run does not."""
    settings = resolved.config.rl
    if settings.staleness:
        return []
    set_keys = {"rl.order": settings.order != "auto", "rl.in_flight_updates": settings.in_flight_updates is not None}
    return [
        Problem(key, "is set, and with rl.staleness = 0 sampling and training take turns", f"Remove {key}, or raise rl.staleness")
        for key, is_set in set_keys.items()
        if is_set
    ]


def _refuse_sampling(resolved: ResolvedConfig) -> list[Problem]:
    """Return the problems of keys that ask for what nobody does where rollouts are recorded."""
    config = resolved.config
    set_keys = {
        "environments": bool(config.environments),
        "evaluation.every": config.evaluation.every is not None,
        "evaluation.at_start": config.evaluation.at_start,
        "evaluation.best": config.evaluation.best is not None,
        "rl.staleness": config.rl.staleness > 0,
        "rl.order": config.rl.order != "auto",
        "rl.in_flight_updates": config.rl.in_flight_updates is not None,
        "rl.concurrency": config.rl.concurrency is not None,
    }
    return [
        Problem(key, "rl.rollouts is set, so that nothing is sampled and no environment answers", f"Remove {key}, or rl.rollouts")
        for key, is_set in set_keys.items()
        if is_set
    ]


def refuse_model_dropout(draft: RlDraft) -> None:
    """Raise UnsupportedError for a model that is trained with dropout."""
    if draft.trains:
        refuse_dropout(
            draft.files.facts,
            "sampled and scored without it: ratios would not be 1, and the sampler would seem to hold other weights",
        )


def refuse_generator(draft: RlDraft) -> None:
    """Refuse a generator that cannot live where the run says, and one that nothing can be trained with."""
    if not draft.is_live:
        return
    resolved = draft.resolved
    staleness = resolved.config.rl.staleness if draft.trains else 0
    label, description = refuse_misplaced_generator(
        resolved,
        draft.longest,
        f"rl.max_prompt_tokens and rl.max_tokens make attempts of up to {draft.longest:,}",
        beside=staleness > 0,
    )
    if staleness and resolved.config.rl.in_flight_updates and "update_while_generating" not in description.capabilities:
        raise UnsupportedError(
            f"rl.in_flight_updates is true, and {label} does not declare the capability 'update_while_generating'",
            remedy="Set rl.in_flight_updates = false: updates then wait until the groups under way have ended",
        )
    if resolved.config.rl.stop_strings and "stop_strings" not in description.capabilities:
        raise UnsupportedError(
            f"rl.stop_strings is set, and {label} does not declare the capability 'stop_strings'",
            remedy="Remove rl.stop_strings, or choose a generator that stops at texts, such as hf",
        )
    if draft.trains:
        refuse_generator_of_other_weights(label, description)


def fit_lengths(prompt: int, answer: int, positions: int) -> dict[str, int]:
    """Return `max_prompt_tokens` and `max_tokens`, in tokens, that fit into a model's positions: the answer gets half of them at most."""
    answer = min(answer, max(1, positions // 2))
    return {"max_prompt_tokens": max(1, min(prompt, positions - answer)), "max_tokens": answer}


def refuse_beyond_positions(draft: RlDraft) -> None:
    """Raise UnsupportedError for attempts that may become longer than the model's positions reach."""
    longest, positions = draft.longest, draft.files.facts.extended_length
    if draft.is_live and positions is not None and longest > positions:
        prompt, answer = find_prompt_limit(draft.resolved.config.rl), draft.resolved.config.rl.max_tokens
        fitting = " ".join(f"rl.{key}={value}" for key, value in fit_lengths(prompt, answer, positions).items())
        raise UnsupportedError(
            f"rl.max_prompt_tokens = {prompt:,} and rl.max_tokens = {answer:,} make attempts of up to {longest:,} tokens, and the model has "
            f"{positions:,} positions",
            remedy=f"Lower them, for instance {fitting}",
        )


def refuse_single_attempts(draft: RlDraft) -> None:
    """Raise UnsupportedError for groups of one attempt under an advantage that compares attempts."""
    settings, advantage = draft.resolved.config.rl, draft.advantage
    if advantage is None or advantage.product.claims.groups != "needed":
        return
    if draft.is_live and settings.group_size == 1:
        raise UnsupportedError(
            f"{advantage.label} compares attempts at one task, and rl.group_size is 1: every advantage would be 0",
            remedy="Raise rl.group_size, or choose an advantage without groups, such as gae or reinforce_pp",
        )
    recording = draft.rollouts
    if isinstance(recording, Recording) and recording.largest == 1:
        raise UnsupportedError(
            f"{advantage.label} compares attempts at one task, and no task of {recording.place} has two: every advantage would be 0",
            remedy="Record groups of several attempts, or choose an advantage without groups, such as gae or reinforce_pp",
        )


def refuse_lonely_attempts(draft: RlDraft) -> None:
    """Raise ConfigError where an environment compares attempts at a task, and there is one attempt."""
    config = draft.resolved.config
    comparing = [part for part in draft.environments if part.product.claims.compares]
    if not comparing:
        return
    counts = {"rl.group_size": config.rl.group_size} if draft.trains else {}
    if tasks_of(comparing, config.evaluation.tasks):
        counts["evaluation.samples"] = config.evaluation.samples
    problems = [
        Problem(key, f"is 1, and {comparing[0].label} compares the attempts at a task: none would have a reward", f"Raise {key}")
        for key, count in counts.items()
        if count == 1
    ]
    if problems:
        raise ConfigError(problems)


def refuse_too_few(draft: RlDraft) -> None:
    """Raise DataError where tasks are not repeated and an environment has fewer than the run takes."""
    settings, rollouts = draft.resolved.config.rl, draft.rollouts
    if settings.repeat_tasks or not draft.trains or not isinstance(rollouts, LiveRolloutSpec):
        return
    tasks = rollouts.tasks
    for part, env_tasks, needed in zip(tasks.environments, tasks.tasks, tasks.needs(settings.steps * settings.groups), strict=True):
        if needed > len(env_tasks):
            raise DataError(
                f"{part.label} has {len(env_tasks):,} tasks, and {settings.steps} steps of {settings.groups} groups take {needed:,} of it",
                remedy="Set rl.repeat_tasks = true, or lower rl.steps",
            )


def refuse_too_few_groups(draft: RlDraft) -> None:
    """Raise DataError where recorded groups are not repeated and there are fewer than the run takes."""
    settings, recording = draft.resolved.config.rl, draft.rollouts
    if not isinstance(recording, Recording) or settings.repeat_tasks:
        return
    needed, there = settings.steps * settings.groups, len(recording.groups)
    if needed > there:
        raise DataError(
            f"{recording.place} has {there:,} groups to train on, and {settings.steps} steps of {settings.groups} take {needed:,}",
            remedy="Set rl.repeat_tasks = true, or lower rl.steps",
        )


def check_turns(draft: RlDraft) -> None:
    """Check that later turns can be rendered, where there are any."""
    if isinstance(draft.rollouts, LiveRolloutSpec):
        validate_turns(draft.rollouts.renderer, draft.environments, draft.rollouts.tasks)


def validate_turns(renderer: ChatRenderer, parts: Sequence[BoundPlugin[Environment]], tasks: TaskOrder) -> None:
    """Prove that later turns can be appended where there are any, with the first task of every environment."""
    for part, trained in zip(parts, tasks.tasks, strict=True):
        # an evaluation may be of held-out tasks alone
        env_tasks = trained if len(trained) else tasks_in(part, "eval")
        if not len(env_tasks):
            continue
        task = task_at(part, env_tasks, 0)
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


def check_first_prompts(draft: RlDraft) -> None:
    """Render the prompts of the first groups' tasks. Raises as `check_prompts` does."""
    if draft.trains and isinstance(rollouts := draft.rollouts, LiveRolloutSpec):
        config = draft.resolved.config
        tasks, limits = _first_tasks(config, rollouts.tasks), limits_of(config, draft.files.facts)
        draft.longest_prompt = check_prompts(draft.environments, tasks, rollouts.renderer, limits)


def check_evaluation(draft: RlDraft) -> None:
    """Check the held-out tasks that the run evaluates on. Raises ConfigError where it is to evaluate on none, and as `check_prompts` does."""
    if draft.trains and isinstance(rollouts := draft.rollouts, LiveRolloutSpec):
        config = draft.resolved.config
        _check_held_out(config, draft.environments, rollouts.renderer, limits_of(config, draft.files.facts))


def _check_held_out(
    config: EngineConfig, parts: Sequence[BoundPlugin[Environment]], renderer: ChatRenderer, limits: PromptLimits
) -> None:
    set_keys = [key for key in ("every", "at_start", "best") if getattr(config.evaluation, key) not in (None, False)]
    if not set_keys and not config.evaluation.at_end:
        return
    held_out = tasks_of(parts, config.evaluation.tasks)
    if set_keys and not held_out:
        raise ConfigError(
            [
                Problem(
                    f"evaluation.{key}",
                    "asks for evaluation, but no environment has a held-out task",
                    f"Remove evaluation.{key}, or hold tasks out: --eval-data, or eval_data or eval_fraction of an environment over a table",
                )
                for key in set_keys
            ]
        )
    check_prompts(parts, held_out, renderer, limits)


def limits_of(config: EngineConfig, facts: ModelFacts) -> PromptLimits:
    """Return what prompts of the run may be."""
    return PromptLimits(find_prompt_limit(config.rl), facts.vocabulary_size, config.rollouts.max_failure_share)


def _first_tasks(config: EngineConfig, tasks: TaskOrder) -> Iterator[tuple[int, Task]]:
    """Yield the tasks that the first groups attempt."""
    most = [most_of(part) for part in tasks.environments]
    return tasks.first(min(config.rl.steps * config.rl.groups, OF_TABLES * len(most)), most)


def plan_any_batch(draft: RlDraft) -> None:
    """Plan a batch of as many attempts as a step has, so that a collator that cannot cut as the run says is refused now.

    One attempt is as long as some are for certain: as the longest that was recorded, or the longest prompt and a token. Others are short, and
    longer ones may still be sampled. Raises what the collator raises.
    """
    config, settings, assembly, rollouts = draft.resolved.config, draft.resolved.config.rl, draft.assembly, draft.rollouts
    if assembly is None or not (draft.trains or config.rl.reward_models):
        return
    size, least, unit = settings.group_size, 2, 1
    if isinstance(rollouts, Recording):
        size, least = rollouts.largest, max(least, rollouts.longest)
    elif rollouts is not None:
        least = max(least, draft.longest_prompt + 1)
    if draft.trains and settings.pairs is not None:
        unit = 2
        size = unit * max(1, min(settings.pairs, size // unit))
    lengths = np.full(settings.groups * size, 2, dtype=np.int64)
    lengths[0] = least
    columns = SampleColumns.create(
        input_ids=np.zeros(int(lengths.sum()), dtype=np.int64),
        token_offsets=offsets_of(lengths),
        action_offsets=np.arange(len(lengths) + 1, dtype=np.int64),
        group_ids=np.repeat(np.arange(settings.groups, dtype=np.int64), size),
        unit_ids=np.arange(len(lengths), dtype=np.int64) // unit,
    )
    together = mini_batch_size([size] * settings.groups, settings.mini_batches)
    plan_batch(assembly.collator, columns, evolve(draft.layout_of(assembly), mini_batch_size=together))


def refuse_shared_devices(draft: RlDraft) -> None:
    """Refuse generators and ranks that are to take turns on devices and cannot."""
    config, assembly = draft.resolved.config, draft.assembly
    table = cast("GeneratorTable | None", config.selected.get("generator"))
    if assembly is None or table is None or not table.share_devices or not draft.is_live:
        return
    key = "generator.share_devices"
    if not draft.loads:
        raise UnsupportedError(f"{key} is set, and no rank has a model", remedy=f"Remove {key}")
    if "offload" not in assembly.description.capabilities:
        raise UnsupportedError(
            f"{key} is set, and the backend {assembly.plugins['backend'].loaded.record.name} does not declare the capability 'offload'",
            remedy="Choose backend fsdp, without cpu_offload, or remove it",
        )
    if config.rl.reward_models:
        raise UnsupportedError(
            f"{key} is set, and a reward model on the ranks values each group while others are sampled",
            remedy=f"Remove {key}, or take the reward from an environment",
        )
    parameters = count_parameters(draft.files.facts.model)
    if parameters is None or find_device(draft.resolved) != "cuda":
        return
    on_this_machine = draft.resolved.assumed.device_bytes is None
    ranks_here = on_this_machine and (config.run.launch == "inline" or config.run.ray_address is None)
    reason = find_reason_against_turns(
        draft.files.facts.model,
        parameters,
        host_bytes=find_free_host_bytes() if ranks_here else None,
        device_bytes=find_device_bytes(draft.resolved),
        devices=config.run.ranks,
    )
    if reason is not None:
        raise UnsupportedError(f"{key} is set: {reason}", remedy=f"Remove {key}, or take more devices or a smaller model")


def refuse_no_messages(draft: RlDraft) -> None:
    """Raise UnsupportedError for attempts without messages, as far as the first ones show, where a reward model reads them by these."""
    reader = next((model for model in draft.reward_models if model.renderer is not None), None)
    rollouts = draft.rollouts
    if reader is None or rollouts is None:
        return
    if isinstance(rollouts, Recording):
        has_messages = all(attempt.messages for attempt in rollouts.groups[0]().finished)
        found = f"the rollouts of {rollouts.place} were recorded without messages"
        remedy = "Name the directory of a run that had this reward model"
    else:
        has_messages = not any(tasks and tasks[0].prompt_ids for tasks in rollouts.tasks.tasks)
        found = "the tasks of an environment are token ids, without messages"
        remedy = "Choose environments whose tasks are messages"
    if not has_messages:
        raise UnsupportedError(
            f"the reward model {reader.path} reads attempts by their messages, because it values steps or has other tokens or another chat "
            f"template than the trained model, and {found}",
            remedy=f"{remedy}, or name one that values whole attempts, with the tokenizer and the chat template of the trained model",
        )


def refuse_no_stops(draft: RlDraft) -> None:
    """Raise UnsupportedError for recorded attempts that do not say what ended them, where `rl.missing_eos_penalty` asks."""
    recording = draft.rollouts
    penalty = draft.resolved.config.rl.missing_eos_penalty
    if penalty is not None and isinstance(recording, Recording) and not recording.has_stops:
        raise UnsupportedError(
            f"rl.missing_eos_penalty is set, and an attempt of {recording.place} does not say what ended its turns",
            remedy="Write them into the column stops, or remove rl.missing_eos_penalty",
        )


def refuse_no_values(draft: RlDraft) -> None:
    """Raise UnsupportedError for passes that read values of a model without a value head."""
    scoring, advantage = draft.scoring, draft.advantage
    if scoring is None or advantage is None:
        return
    if "values" in scoring.scores.values() and not draft.resolved.config.model.value_head:
        raise UnsupportedError(
            f"{advantage.label} needs old_values, and the model has no value head",
            remedy="Set model.value_head = true, or choose an advantage without values, such as grpo or reinforce_pp",
        )


def refuse_unsteered_entropy(draft: RlDraft) -> None:
    """Raise UnsupportedError for `[rl.entropy]` without the one term that it steers."""
    control = draft.resolved.config.rl.entropy
    if draft.trains and control is not None and draft.assembly is not None:
        EntropyControl.start(control, draft.assembly.objective)


def refuse_unread_reference_keys(draft: RlDraft) -> None:
    """Raise ConfigError for keys of `[reference]` where nothing reads a reference."""
    if draft.trains and draft.scoring is not None and not draft.scoring.reference:
        refuse_unread_reference(draft.resolved)


def warn_of_settings(draft: RlDraft) -> None:
    """Log what is allowed and hardly meant."""
    if draft.trains and draft.assembly is not None:
        for warning in _collect_warnings(
            draft.resolved.config.rl, draft.assembly, None if draft.scoring is None else draft.scoring.old
        ):
            logger.warning("%s", warning)


def _collect_warnings(settings: RlConfig, assembly: Assembly, old: str | None) -> Iterator[str]:
    """Tell what is allowed and hardly meant."""
    if settings.pairs is None:
        yield from _collect_warnings_of_ratios(settings, assembly, old)
    longest = find_attempt_limit(settings)
    together, what = (longest, "attempt") if settings.pairs is None else (2 * longest, "pair of attempts")
    budget = budget_of(settings)
    if budget is not None and budget < together:
        yield (
            f"rl.micro_batch_tokens = {budget} holds no {what} of rl.max_prompt_tokens + rl.max_tokens = {longest} "
            "tokens: the run stops at the first that does not fit. Raise it, or lower one of these"
        )


def _collect_warnings_of_ratios(settings: RlConfig, assembly: Assembly, old: str | None) -> Iterator[str]:
    """Tell what is hardly meant where attempts are trained on by their advantages; pairs need no ratio to the policy that sampled them."""
    if settings.staleness and old != "rollout" and ROLLOUT_LOGPROBS not in assembly.objective.columns:
        yield (
            f"rl.staleness = {settings.staleness}, and no part of the loss reads rollout_logprobs: groups of older weights are learned as if "
            'the present ones had sampled them. Set rl.old = "rollout", or add a correction such as tis'
        )
    updates = settings.mini_batches * settings.epochs
    if updates > 1 and {OLD_LOGPROBS, ROLLOUT_LOGPROBS}.isdisjoint(assembly.objective.columns):
        yield (
            f"a batch is learned in {updates} optimizer steps (rl.mini_batches x rl.epochs), and no part of the loss reads old_logprobs or "
            "rollout_logprobs: after the first of them the policy is another one than sampled, and no ratio corrects for it. Choose a loss "
            "with a ratio, such as ppo, or one step per batch"
        )
    read = {name for needs in assembly.needs.values() for name in needs}
    if _REWARDED.isdisjoint(read) and not any(name.startswith("teacher") for name in read):
        yield (
            f"no part of the loss reads {', '.join(sorted(_REWARDED))}: all attempts are learned alike, whatever their reward. "
            "Choose a loss that reads advantages, such as ppo, unless a filter of groups chooses what is learned"
        )


Check = Callable[[RlDraft], None]

BEFORE_BUILDING: Final[tuple[Check, ...]] = (refuse_contradictions, refuse_model_dropout, refuse_generator, refuse_beyond_positions)

AFTER_BUILDING: Final[tuple[Check, ...]] = (
    refuse_single_attempts,
    refuse_lonely_attempts,
    refuse_losses_of_other_samples,
    refuse_recording_without_pairs,
    check_turns,
    refuse_too_few,
    refuse_too_few_groups,
    check_first_prompts,
    check_evaluation,
    plan_any_batch,
    refuse_shared_devices,
    refuse_no_values,
    refuse_unsteered_entropy,
    refuse_no_messages,
    refuse_no_stops,
    refuse_unread_reference_keys,
)
