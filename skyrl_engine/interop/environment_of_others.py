"""An environment of this engine, and its episodes, for trainers that sample by themselves."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from skyrl_engine.contracts.kinds.environment import Action, Environment, Episode, Message, StepResult, Task
from skyrl_engine.errors import ResultError, UnsupportedError
from skyrl_engine.interop.own_loop import await_value
from skyrl_engine.interop.selection import Options, load_plugin

if TYPE_CHECKING:
    from skyrl_engine.registry.bound_plugin import BoundPlugin

NOT_READ = "rows-of-the-trainer"
"""The option `data` of an environment whose tasks are the trainer's own rows."""


def bind_environment(environment: object, options: Options) -> "BoundPlugin[Environment]":
    """Return the environment that a name means, or a plugin itself, at work. Its option `data` may be missing: no table is read.

    Raises ConfigError for options, and what selecting a plugin raises.
    """
    from skyrl_engine.config import SelectedPlugin
    from skyrl_engine.contracts.kinds.context import FactoryContext
    from skyrl_engine.registry.resolve import Registry

    loaded = load_plugin(Registry.discover(), "environment", environment)
    required = () if loaded.schema is None else [each.name for each in attrs.fields(loaded.schema) if each.default is attrs.NOTHING]
    filled = {**({"data": NOT_READ} if "data" in required else {}), **options}
    bound: BoundPlugin[Environment] = SelectedPlugin.of_loaded(loaded, filled, "environment_options").bind(
        "environment", FactoryContext()
    )
    return bound


def make_task(messages: tuple[Message, ...], data: Mapping[str, Any]) -> Task:
    """Return a task of another trainer's row. Its key is the row's `key` or `id`, else a hash of all that it holds."""
    for name in ("key", "id"):
        if data.get(name) is not None:
            return Task(str(data[name]), messages, data=data)
    content = json.dumps([list(map(dict, messages)), data], sort_keys=True, default=repr, ensure_ascii=False)
    return Task(hashlib.sha256(content.encode()).hexdigest()[:16], messages, data=data)


def draw_seed(task: Task, attempt: int) -> int:
    """Return the seed of an attempt at a task, uint64."""
    return int.from_bytes(hashlib.sha256(f"{task.key}/{attempt}".encode()).digest()[:8], "big")


async def answer_turn(environment: "BoundPlugin[Environment]", episode: Episode, action: Action) -> StepResult:
    """Return the episode's answer to a turn. Raises PluginBrokenError where it fails, ResultError for another answer or a reward not finite."""
    from skyrl_engine.registry.owner import blame

    with blame(environment.owner, "a step"):
        answer = await await_value(episode.step(action))
    if not isinstance(answer, StepResult) or not math.isfinite(total_reward(answer)):
        raise ResultError(
            f"{environment.label} answered a turn with {answer!r:.120}", remedy="Return a StepResult with a finite reward"
        )
    return answer


def total_reward(answer: StepResult) -> float:
    """Return the reward of a turn: the sum of those of its tokens, where tokens have rewards."""
    return float(answer.reward if answer.token_rewards is None else sum(answer.token_rewards))


async def score_attempt(
    environment: "BoundPlugin[Environment]", task: Task, text: str, token_ids: tuple[int, ...], attempt: int
) -> StepResult:
    """Return the answer to an attempt of one turn.

    Raises UnsupportedError for an environment that speaks before the model, or goes on after its first turn, and what `answer_turn` raises.
    """
    from skyrl_engine.registry.owner import blame

    with blame(environment.owner, "opening an episode"):
        episode = environment.product.open(task, draw_seed(task, attempt))
    try:
        with blame(environment.owner, "the begin of an episode"):
            opening = await await_value(episode.begin())
        answer = await answer_turn(environment, episode, Action(text, token_ids, 0, "stop"))
    finally:
        with blame(environment.owner, "the close of an episode"):
            await await_value(episode.close())
    if opening or not answer.done:
        raise UnsupportedError(
            f"{environment.label} {'speaks before' if opening else 'asks for another turn of'} the model, which a reward function cannot do",
            remedy="Give GRPOTrainer trl_environment(...) as its environment_factory, or train with it by this engine",
        )
    return answer


def refuse_several_turns(environment: "BoundPlugin[Environment]") -> None:
    """Raise UnsupportedError for an environment that may ask for a second turn of the model."""
    if (turns := environment.product.claims.max_turns) > 1:
        raise UnsupportedError(
            f"{environment.label} has attempts of up to {turns} turns, and a reward function sees the text of one",
            remedy="Give GRPOTrainer trl_environment(...) as its environment_factory, or train with it by this engine",
        )
