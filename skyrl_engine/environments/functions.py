"""Tasks out of a table, functions as rewards, functions as tools; and `reward` and `group_reward`, which make an environment of a function."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from attrs import define, field, frozen

from skyrl_engine.contracts.kinds.environment import (
    Action,
    EndedAttempt,
    EnvironmentClaims,
    Message,
    Split,
    StepResult,
    Task,
    Tasks,
)
from skyrl_engine.environments.table_tasks import TableOptions, TableTasks
from skyrl_engine.environments.tools import Tool, answer_calls
from skyrl_engine.errors import ContractError
from skyrl_engine.hooks.decorators import FunctionPlugin, with_parentheses
from skyrl_engine.hooks.markers import hookimpl
from skyrl_engine.interop.rewards import Form, as_reward, only_of

Score = Callable[[Action, Task], Any]
Comparison = Callable[[list[str], Task], Any]


@frozen(eq=False)
class WeightedReward:
    """A reward function by its name, and its share of the sum."""

    name: str
    score: Score
    weight: float = 1.0


@define(eq=False)
class FunctionEnvironment:
    """Scores an attempt with functions, when the model stops calling tools.

    The reward is the sum of `rewards` times their weights, 0 without any; with several, `parts` shows each summand. A reward function returns a
    number, or, where it is alone, a `StepResult`. `comparison` rewards the texts of a group together when all have ended.
    """

    options: TableOptions
    rewards: Sequence[WeightedReward]
    tools: Sequence[Tool] = ()
    claims: EnvironmentClaims = field(factory=EnvironmentClaims)
    comparison: Comparison | None = None

    def tasks(self, split: Split) -> Tasks:
        """Return the rows of a split as tasks; none are held out where no option says so."""
        return TableTasks(self.options, split, tuple(tool.schema for tool in self.tools))

    def open(self, task: Task, seed: int) -> "FunctionEpisode":  # noqa: ARG002 -- functions draw nothing
        return FunctionEpisode(self, task)

    async def compare(self, task: Task, attempts: Sequence[EndedAttempt]) -> list[StepResult]:
        """Return what `comparison` gives each of the attempts."""
        assert self.comparison is not None, "its claims say so"
        values = await _await_value(self.comparison([attempt.text for attempt in attempts], task))
        # keys of a mapping and members of a set would be taken for rewards
        if (
            not hasattr(values, "__len__")
            or isinstance(values, str | bytes | Mapping | AbstractSet)
            or len(values) != len(attempts)
        ):
            raise ContractError(
                f"a group reward returned {values!r:.80} for {len(attempts)} attempts",
                remedy="Return a list with one reward per text",
            )
        return [value if isinstance(value, StepResult) else StepResult(number_of("of a group", value)) for value in values]


@define(eq=False)
class FunctionEpisode:
    """One attempt."""

    environment: FunctionEnvironment
    task: Task

    def begin(self) -> tuple[Message, ...]:
        return ()

    async def step(self, action: Action) -> StepResult:
        """Answer calls of tools, or score the attempt."""
        last = action.turn + 1 >= self.environment.claims.max_turns
        asked = () if last else await answer_calls(self.environment.tools, action)
        return StepResult(0.0, done=False, messages=asked) if asked else await self._score(action)

    def close(self) -> None:
        """Hold nothing."""

    async def _score(self, action: Action) -> StepResult:
        rewards = self.environment.rewards
        values = [await _await_value(reward.score(action, self.task)) for reward in rewards]
        if len(rewards) == 1 and isinstance(values[0], StepResult) and rewards[0].weight == 1.0:
            result: StepResult = values[0]
            return result
        # None is TRL's word for a reward that does not apply to a task
        rewarded = [
            (reward, value) for reward, value in zip(rewards, values, strict=True) if value is not None or len(rewards) == 1
        ]
        parts = {reward.name: reward.weight * number_of(reward.name, value) for reward, value in rewarded}
        return StepResult(sum(parts.values(), start=0.0), parts=parts if len(rewards) > 1 else {})


async def _await_value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def number_of(name: str, value: Any) -> float:
    """Return what a reward function returned as a number. Raises ContractError for what is none, or not finite."""
    # NumPy's numbers, and arrays and tensors of one
    number = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise ContractError(
            f"the reward {name} returned {value!r:.80}",
            remedy="Return a finite number for every text, also for wrong ones (or a StepResult, from a function that is alone)",
        )
    return float(number)


@define(eq=False)
class RewardPlugin(FunctionPlugin):
    """A reward function as an environment of one turn; calling it calls the function."""

    config: type[TableOptions]
    pass_threshold: float
    batch: bool = False

    @hookimpl
    def skyrl_engine_make_environment(self, config: TableOptions) -> FunctionEnvironment:
        takes_config = "config" in inspect.signature(self.function).parameters
        score = _Scored(self.function, config if takes_config else None, self.batch)
        claims = EnvironmentClaims(pass_threshold=self.pass_threshold)
        return FunctionEnvironment(config, [WeightedReward(self.name, score)], claims=claims)


@define(eq=False)
class GroupRewardPlugin(FunctionPlugin):
    """A function that rewards the attempts of a group together, as an environment of one turn; calling it calls the function."""

    usable_alone: ClassVar[bool] = False

    config: type[TableOptions]
    pass_threshold: float | None
    order_matters: bool

    @hookimpl
    def skyrl_engine_make_environment(self, config: TableOptions) -> FunctionEnvironment:
        more = (config,) if "config" in inspect.signature(self.function).parameters else ()
        claims = EnvironmentClaims(pass_threshold=self.pass_threshold, compares=True, order_matters=self.order_matters)
        return FunctionEnvironment(config, (), claims=claims, comparison=_Compared(self.function, more))


@frozen(eq=False)
class _Compared:
    """A decorated function as one of texts and their task; `more` is the config, where the function takes it."""

    function: Callable[..., Any]
    more: tuple[TableOptions, ...]

    def __call__(self, texts: list[str], task: Task) -> Any:
        return self.function(texts, task, *self.more)


@frozen(eq=False)
class _Scored:
    """A decorated function as one of an action; `config` is given where the function takes it."""

    function: Callable[..., Any]
    config: TableOptions | None
    batch: bool

    def __call__(self, action: Action, task: Task) -> Any:
        more = () if self.config is None else (self.config,)
        if self.batch:
            return only_of(self.function, self.function([action.text], [task], *more))
        return self.function(action.text, task, *more)


@with_parentheses
def reward(
    *, config: type[TableOptions] = TableOptions, pass_threshold: float = 1.0, batch: bool = False
) -> Callable[[Callable[..., Any]], RewardPlugin]:
    """Make an environment plugin of `function(text, task[, config]) -> float | StepResult`, which may be a coroutine.

    With `batch` it is `function(texts, tasks[, config])`, of lists, and returns a list; an engine that scores attempts as they end gives it
    lists of one. Its tasks are rows of `data`; `config` is an attrs class that extends `TableOptions` by options of its own. Raises TypeError
    for another class, and for a function that takes something else.
    """
    if not (isinstance(config, type) and issubclass(config, TableOptions)):
        raise TypeError(
            f"config must be a class that extends skyrl_engine.environments.TableOptions, which says where tasks are, not {config!r}"
        )

    def decorate(function: Callable[..., Any]) -> RewardPlugin:
        names: Mapping[str, Any] = inspect.signature(function).parameters
        due = ("texts", "tasks") if batch else ("text", "task")
        if tuple(names)[:2] != due or set(names) - {*due, "config"}:
            description, first = "a reward with batch=True" if batch else "a reward", ", ".join(due)
            raise TypeError(
                f"{function.__name__} takes ({', '.join(names)}), and {description} takes ({first}) or ({first}, config)"
            )
        return RewardPlugin(function, config, pass_threshold, batch)

    return decorate


@with_parentheses
def group_reward(
    *, config: type[TableOptions] = TableOptions, pass_threshold: float | None = None, order_matters: bool = False
) -> Callable[[Callable[..., Any]], GroupRewardPlugin]:
    """Make an environment plugin of `function(texts, task[, config])`, which sees the attempts of a group together when all have ended.

    `texts` are those of the attempts that did not fail, two or more, in their order; it returns as many numbers, or StepResults, and may be a
    coroutine. `config` is as for `reward`. `pass_threshold` None says that a reward that compares makes no attempt right or wrong.
    `order_matters` says that a text may be rewarded otherwise in another place of the list. Raises TypeError for another class, and for a
    function that takes something else.
    """
    if not (isinstance(config, type) and issubclass(config, TableOptions)):
        raise TypeError(
            f"config must be a class that extends skyrl_engine.environments.TableOptions, which says where tasks are, not {config!r}"
        )

    def decorate(function: Callable[..., Any]) -> GroupRewardPlugin:
        names = tuple(inspect.signature(function).parameters)
        if names not in (("texts", "task"), ("texts", "task", "config")):
            raise TypeError(
                f"{function.__name__} takes ({', '.join(names)}), and a group reward takes (texts, task) or (texts, task, config)"
            )
        return GroupRewardPlugin(function, config, pass_threshold, order_matters)

    return decorate


def make_weighted_reward(function: Callable[..., Any], name: str, weight: float = 1.0, form: Form = "auto") -> WeightedReward:
    """Make a reward of a function of ours, of TRL's form or of verl's. Raises ContractError for a group reward: it sees no single attempt."""
    if isinstance(function, GroupRewardPlugin):
        raise ContractError(
            f"{name} rewards the attempts of a group together, and is an environment of its own",
            remedy=f'Set environments.use = "FILE.py:{name}" with data, or give --env FILE.py:{name}',
        )
    return WeightedReward(name, as_reward(function, form), weight)
