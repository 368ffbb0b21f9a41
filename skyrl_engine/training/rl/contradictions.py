"""Refuse while planning what keys, plugins and the model of a run by reinforcement cannot mean together."""

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.contracts.kinds.advantage import Advantage
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.engine.sampler import refuse_elsewhere
from skyrl_engine.errors import ConfigError, DataError, Problem, UnsupportedError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.training.rl.scoring import ScoringPasses
from skyrl_engine.training.rl.tasks import TaskOrder


def refuse_single_attempts(resolved: ResolvedConfig, advantage: BoundPlugin[Advantage]) -> None:
    """Raise UnsupportedError for groups of one attempt under an advantage that compares attempts."""
    settings = resolved.config.rl
    if settings.rollouts is None and settings.group_size == 1 and advantage.product.claims.groups == "needed":
        raise UnsupportedError(
            f"{advantage.label} compares attempts at one task, and rl.group_size is 1: every advantage would be 0",
            remedy="Raise rl.group_size, or choose an advantage without groups, such as gae or reinforce_pp",
        )


def refuse_no_values(model: ModelConfig, advantage: BoundPlugin[Advantage], chosen: ScoringPasses) -> None:
    """Raise UnsupportedError for a recipe that reads values of a model without a value head."""
    if "values" in chosen.scores.values() and not model.value_head:
        raise UnsupportedError(
            f"{advantage.label} needs old_values, and the model has no value head",
            remedy="Set model.value_head = true, or choose an advantage without values, such as grpo or reinforce_pp",
        )


def refuse_contradictions(resolved: ResolvedConfig, *, trains: bool) -> None:
    """Raise ConfigError with every key that contradicts another one; some do so only where the run trains."""
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
            Problem(
                "reference.precompute", "rollouts are sampled anew in every step, so nothing is there to score before", "Remove it"
            )
        )
    if trains and settings.rollouts is None and fewest is not None and fewest > settings.group_size:
        problems.append(
            Problem(
                "rollouts.min_group_size",
                f"is {fewest}, and a group has rl.group_size = {settings.group_size} attempts: every group would be dropped",
                "Lower rollouts.min_group_size, or raise rl.group_size",
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


def refuse_generator(resolved: ResolvedConfig, *, trains: bool) -> None:
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


def refuse_beyond_positions(resolved: ResolvedConfig, files: ModelFiles) -> None:
    """Raise UnsupportedError for attempts that may become longer than the model's positions reach."""
    settings = resolved.config.rl
    longest, positions = settings.max_prompt_tokens + settings.max_tokens, files.facts.extended_length
    if positions is not None and longest > positions:
        raise UnsupportedError(
            f"rl.max_prompt_tokens and rl.max_tokens make attempts of up to {longest:,} tokens, and the model has {positions:,} positions",
            remedy="Lower one of them",
        )


def refuse_too_few(resolved: ResolvedConfig, tasks: TaskOrder) -> None:
    """Raise DataError where tasks are not repeated and an environment has fewer than the run takes."""
    settings = resolved.config.rl
    if settings.repeat_tasks:
        return
    for part, own, needed in zip(tasks.environments, tasks.tasks, tasks.needs(settings.steps * settings.groups), strict=True):
        if needed > len(own):
            raise DataError(
                f"{part.label} has {len(own):,} tasks, and {settings.steps} steps of {settings.groups} groups take {needed:,} of it",
                remedy="Set rl.repeat_tasks = true, or lower rl.steps",
            )
