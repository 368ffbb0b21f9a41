"""Groups of attempts for environments that compare them: drawn, played to their end, and compared by hand."""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from attrs import evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.environment import EndedAttempt, Message, Task
from skyrl_engine.rollout.episode_process import wrong_comparison
from skyrl_engine.testing.environments.bench import (
    Script,
    Turn,
    answer,
    format_error,
    scripts,
    stages,
    task_for,
    to_plain,
)
from skyrl_engine.testing.promise import Undecidable
from skyrl_engine.testing.subject import Subject

MOST_PLAYED = 8
"""Turns of an attempt, after which it is compared as it stands."""

TEXTS = ("4", "yes", "4", "", "the answer is 4", "x" * 40)
"""Answers of a group, two of which are equal."""


@frozen
class ComparedGroup:
    """Attempts at one task, each by its script, and another order of them: the number that stands at each place."""

    attempts: tuple[Script, ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"attempt {number}: {script}" for number, script in enumerate(self.attempts)]
        return "\n".join([*lines, f"in another order: {', '.join(map(str, self.order))}"])


def group_of(texts: Sequence[str], order: Sequence[int] | None = None) -> ComparedGroup:
    """Return the group of these answers to the first task, by default with their opposite order."""
    attempts = tuple(Script("train", 0, number, (Turn("text", text),)) for number, text in enumerate(texts))
    return ComparedGroup(attempts, tuple(order or range(len(texts))[::-1]))


def list_groups(_subject: Subject[Any]) -> list[ComparedGroup]:
    """Return groups with equal answers, with none, and with two."""
    return [group_of(TEXTS), group_of(("yes", "yes")), group_of(("", "4"))]


def groups(subject: Subject[Any]) -> "st.SearchStrategy[ComparedGroup]":
    """Draw groups of two to five attempts at one task, and an order of them."""

    def at_one_task(attempts: list[Script]) -> "st.SearchStrategy[ComparedGroup]":
        same_task = tuple(evolve(script, number=attempts[0].number) for script in attempts)
        return st.permutations(range(len(attempts))).map(lambda order: ComparedGroup(same_task, tuple(order)))

    return st.lists(scripts(subject), min_size=2, max_size=5).flatmap(at_one_task)


def play_group(subject: Subject[Any], environment: Any, group: ComparedGroup) -> tuple[Task, list[EndedAttempt]]:
    """Play the attempts of a group to their ends; return their task, and what an environment is shown of them."""
    return task_for(environment, group.attempts[0]), [_play_attempt(subject, environment, script) for script in group.attempts]


def _play_attempt(subject: Subject[Any], environment: Any, script: Script) -> EndedAttempt:
    task = task_for(environment, script)
    messages = list[Message](deepcopy(task.messages))
    try:
        with stages(subject, environment) as open_stage:
            stage = open_stage(task, script.seed)
            messages += answer(stage, None)["messages"]
            while not stage.done and stage.turn < min(MOST_PLAYED, environment.claims.max_turns):
                answered = answer(stage, script.turn(stage.turn))
                assert stage.last is not None, "a turn was taken"
                calls = [{"type": "function", "id": call.id, "function": {"name": call.name}} for call in stage.last.tool_calls]
                messages.append({"role": "assistant", "content": stage.last.text, **({"tool_calls": calls} if calls else {})})
                messages += answered["messages"]
            return EndedAttempt("" if stage.last is None else stage.last.text, tuple(messages))
    except Undecidable:
        raise
    except Exception as error:
        raise Undecidable(f"an episode cannot be opened: {format_error(error)}") from error


def call_compare(environment: Any, task: Task, attempts: list[EndedAttempt]) -> Any:
    """Return what `compare` returns, whatever it is; it is given these very arguments. What it raises is raised."""
    with asyncio.Runner() as loop:
        # called outside of the running loop, as in a run
        value = environment.compare(task, attempts)
        return loop.run(_await_value(value)) if inspect.isawaitable(value) else value


async def _await_value(value: Any) -> Any:
    return await value


def compare_attempts(environment: Any, task: Task, attempts: Sequence[EndedAttempt]) -> list[Mapping[str, Any]]:
    """Return what is learned from of a comparison, by attempt: reward, parts and success. Raises Undecidable where it fails or is none."""
    try:
        returned = call_compare(environment, deepcopy(task), deepcopy(list(attempts)))
    except Exception as error:
        raise Undecidable(f"compare fails: {format_error(error)}") from error
    if (wrong := wrong_comparison(returned, len(attempts))) is not None:
        raise Undecidable(wrong)
    return [{name: to_plain(result)[name] for name in ("reward", "parts", "success")} for result in returned]


def compare_group(subject: Subject[Any], environment: Any, group: ComparedGroup) -> list[Mapping[str, Any]]:
    """Play the attempts of a group, and return what is learned from of their comparison."""
    return compare_attempts(environment, *play_group(subject, environment, group))
