"""A reward of this engine as verl's `custom_reward_function` (0.9)."""

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from skyrl_engine.contracts.kinds.environment import Environment
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.interop.environment_of_others import (
    bind_environment,
    make_task,
    refuse_several_turns,
    score_attempt,
    total_reward,
)
from skyrl_engine.interop.own_loop import wait_for
from skyrl_engine.interop.selection import NO_OPTIONS, Options

if TYPE_CHECKING:
    from skyrl_engine.registry.bound_plugin import BoundPlugin


def verl_reward(environment: object, *, options: Options = NO_OPTIONS) -> "VerlReward":
    """Return verl's `compute_score` that rewards a response as this environment rewards an attempt.

    `environment` and `options` are as for `trl_reward`. In the file that `custom_reward_function.path` names, one line makes the function:
    `compute_score = verl_reward("./mine.py:letters")`. Raises UnsupportedError for an environment of several turns or one that compares
    attempts, ConfigError for options, and what selecting a plugin raises.
    """
    bound = bind_environment(environment, options)
    refuse_several_turns(bound)
    if bound.product.claims.compares:
        raise UnsupportedError(
            f"{bound.label} compares the attempts at a task, and verl scores each alone",
            remedy="Choose a reward of single attempts, or train with it by this engine",
        )
    return VerlReward(bound, "compute_score")


@frozen(eq=False)
class VerlReward:
    """The product of `verl_reward`."""

    environment: "BoundPlugin[Environment]"
    __name__: str = field(alias="name")

    def __call__(
        self, data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **more: Any
    ) -> float | dict[str, float]:
        """Return the score, or with parts and metrics of the answer a mapping that holds `score` too.

        `task.data` are the entries of `extra_info` and `more`, and `data_source`, `ground_truth` and `extra_info` themselves;
        `task.messages` are empty, since verl passes no prompt. Raises what the environment raises.
        """
        given = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
        task = make_task((), {**(extra_info or {}), **more, **given})
        answer = wait_for(score_attempt(self.environment, task, solution_str, (), 0))
        named = {**answer.parts, **answer.metrics}
        return {**named, "score": total_reward(answer)} if named else total_reward(answer)
