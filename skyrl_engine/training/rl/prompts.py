"""Check the prompts that a run will attempt before anything is sampled: their form, their length, and their tokens."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.kinds.environment import Environment, Task
from skyrl_engine.environments.table_tasks import TableTasks
from skyrl_engine.errors import DataError, UnsupportedError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.rollout.process_handle import refuse_unsendable

logger = logging.getLogger(__name__)

OF_TABLES: Final = 2000
"""Tasks of an environment that are checked where they were read from a table, those of the first groups."""

OF_PROCEDURES: Final = 200
"""Tasks that are checked where making one may take long."""


@frozen
class PromptLimits:
    """Limits of a prompt: at most `tokens` long, of ids below `vocabulary` (None: nobody knows).

    Of a procedure's tasks, a share of `failures` may be too long: these attempts fail.
    """

    tokens: int
    vocabulary: int | None
    failures: float


def check_prompts(
    parts: Sequence[BoundPlugin[Environment]], tasks: Iterable[tuple[int, Task]], renderer: ChatRenderer, limits: PromptLimits
) -> int:
    """Render the prompts of tasks, each with the number of its environment among `parts`; return the tokens of the longest that is allowed.

    Raises DataError for a task without a prompt or with two, for two tasks of one key, and for prompts that are too long; UnsupportedError for
    images; RolloutError for a task that is no JSON; what the renderer raises for messages that the template refuses.
    """
    lengths: dict[int, dict[str, int]] = {}
    for number, task in tasks:
        name = f"{parts[number].label}: task {task.key!r}"
        env_lengths = lengths.setdefault(number, {})
        if task.key in env_lengths:
            raise DataError(
                f"{name} is there twice: attempts are told apart by the keys of their tasks",
                remedy="Give every task a key of its own",
            )
        refuse_unsendable(task, name)
        env_lengths[task.key] = len(_prompt(task, name, renderer, limits))
    for number, env_lengths in lengths.items():
        _check_lengths(parts[number], env_lengths, limits)
    return max(
        (length for env_lengths in lengths.values() for length in env_lengths.values() if length <= limits.tokens), default=0
    )


def most_of(part: BoundPlugin[Environment]) -> int:
    """Return how many tasks of an environment are checked."""
    return OF_TABLES if isinstance(part.product.tasks("train"), TableTasks) else OF_PROCEDURES


def _prompt(task: Task, name: str, renderer: ChatRenderer, limits: PromptLimits) -> npt.NDArray[Any]:
    if task.images:
        raise UnsupportedError(f"{name} has images, which rollouts do not take yet", remedy="Choose tasks of text")
    if bool(task.messages) == bool(task.prompt_ids):
        forms = "both messages and prompt_ids" if task.messages else "neither messages nor prompt_ids"
        raise DataError(f"{name} has {forms}", remedy="Give every task one of them")
    ids = np.asarray(task.prompt_ids) if task.prompt_ids else renderer.prompt(task.messages, task.tools, name=name)
    if limits.vocabulary is not None and not 0 <= int(ids.min(initial=0)) <= int(ids.max(initial=0)) < limits.vocabulary:
        strange = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise DataError(
            f"the prompt of {name} has the token id {strange}, and the model's vocabulary has {limits.vocabulary:,}",
            remedy="Give prompt_ids of this model" if task.prompt_ids else "Use the model's own tokenizer: remove model.tokenizer",
        )
    return ids


def _check_lengths(part: BoundPlugin[Environment], lengths: dict[str, int], limits: PromptLimits) -> None:
    long = {key: length for key, length in lengths.items() if length > limits.tokens}
    if not long:
        return
    longest = max(long, key=lambda key: long[key])
    cause = (
        f"{part.label}: {len(long):,} of {len(lengths):,} tasks have a prompt of more than rl.max_prompt_tokens = {limits.tokens:,} tokens; "
        f"that of task {longest!r} has {long[longest]:,}"
    )
    if isinstance(part.product.tasks("train"), TableTasks) or len(long) > limits.failures * len(lengths):
        raise DataError(cause, remedy=f"Raise rl.max_prompt_tokens to {long[longest]}, or leave such tasks out")
    logger.warning("%s: attempts at such tasks fail, and are not trained on", cause)
