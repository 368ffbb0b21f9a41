"""An environment of this engine as `environment_factory` of TRL's GRPOTrainer (1.16): the model speaks to it through one tool."""

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from skyrl_engine.contracts.kinds.environment import Action, Environment, Episode, Message
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.interop.environment_of_others import answer_turn, bind_environment, draw_seed, make_task, total_reward
from skyrl_engine.interop.own_loop import await_value, wait_for
from skyrl_engine.interop.selection import NO_OPTIONS, Options

if TYPE_CHECKING:
    from skyrl_engine.registry.bound_plugin import BoundPlugin

OVER = "The attempt is over."


def trl_environment(environment: object, *, options: Options = NO_OPTIONS) -> "Callable[[], TrlEnvironment]":
    """Return an `environment_factory` in which a model plays the episodes of this environment.

    TRL ends a rollout at the first turn without a call of a tool. So every turn of the model that the environment is to see is a call
    `answer(text)`, and what the environment says is the tool's result; the reward of an attempt is the sum over its turns, 0 where the model
    never answered. A row of the dataset has `prompt`, as messages, and the task's data in its other columns.

    Raises UnsupportedError for an environment that compares attempts or offers its own tools, ConfigError for options, and what selecting a
    plugin raises.
    """
    bound = bind_environment(environment, options)
    if bound.product.claims.compares:
        raise UnsupportedError(
            f"{bound.label} compares the attempts at a task, and TRL's environments are alone",
            remedy="Use trl_reward(..., num_generations=...) for a reward of groups",
        )
    return type(f"{bound.name}_environment", (TrlEnvironment,), {"_environment": bound, "_attempts": itertools.count()})


class TrlEnvironment:
    """One attempt at a time; TRL calls every public method but `reset` and `get_reward` a tool."""

    _environment: "ClassVar[BoundPlugin[Environment]]"
    _attempts: ClassVar[Iterator[int]]

    def __init__(self) -> None:
        self._episode: Episode | None = None
        self._reward = 0.0
        self._turn = 0
        self._done = False

    def reset(self, prompt: Any = (), **columns: Any) -> str | None:
        """Begin an attempt at the task of this row. Return what the environment says first, or None."""
        self._close()
        messages: tuple[Message, ...] = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        task = make_task(messages, columns)
        self._reward, self._turn, self._done = 0.0, 0, False
        return wait_for(self._begin(task))

    def answer(self, text: str) -> str:
        """Give your answer, and read the reply.

        Args:
            text: Your answer, as you would write it.

        Returns:
            The reply.
        """
        if self._done or self._episode is None:
            return OVER
        result = wait_for(answer_turn(self._environment, self._episode, Action(text, (), self._turn, "stop")))
        self._turn += 1
        self._reward += total_reward(result)
        self._done = result.done
        if result.done:
            self._close()
            return OVER
        return _join_texts(result.messages)

    def get_reward(self) -> float:
        """Return the reward of the attempt so far."""
        return self._reward

    async def _begin(self, task: Any) -> str | None:
        from skyrl_engine.registry.owner import blame

        if task.tools:
            raise UnsupportedError(f"{self._environment.label} offers tools", remedy="Give them to GRPOTrainer as its tools")
        with blame(self._environment.owner, "the begin of an episode"):
            self._episode = self._environment.product.open(task, draw_seed(task, next(self._attempts)))
            opening = await await_value(self._episode.begin())
        return _join_texts(opening) if opening else None

    def _close(self) -> None:
        from skyrl_engine.registry.owner import blame

        if self._episode is not None:
            episode, self._episode = self._episode, None
            with blame(self._environment.owner, "the close of an episode"):
                wait_for(await_value(episode.close()))


def _join_texts(messages: tuple[Message, ...]) -> str:
    return "\n".join(str(message["content"]) for message in messages)
