"""Environment: tasks, and episodes that answer a model's turns with rewards and messages. No torch."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, Protocol

from attrs import Factory, field, frozen

from skyrl_engine.contracts.values.rollout import FinishReason
from skyrl_engine.contracts.values.rollout_columns import find_unknown_column
from skyrl_engine.errors import ContractError

Message = Mapping[str, Any]
"""A chat message of plain JSON values: `role`, `content`, and what else chat templates read."""

Split = Literal["train", "eval"]


@frozen
class Task:
    """A prompt and what scoring it needs, as plain JSON values. `key` is the same in every run and after every resume.

    The prompt is `messages`, or `prompt_ids` where it is tokens already; exactly one of them. `prompt_text` is the prompt as the data has it,
    where that is one text and no message: reward functions of others are given it as such. `data` is the environment's own, `tools` are
    function schemas for the chat template. Images are refused for now.
    """

    key: str
    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    data: Mapping[str, Any] = Factory(dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    images: tuple[str, ...] = ()
    prompt_text: str | None = None


@frozen
class ToolCall:
    """A call of a tool as the model wrote it: its name, and its arguments as JSON values."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@frozen
class Action:
    """One turn of the model.

    `text` is decoded without special tokens, stop string included; `token_ids` are what was sampled; `turn` counts from 0; `finish` says how it
    ended. `tool_calls` are those that could be read from the text, and `tool_problem` says what could not.
    """

    text: str
    token_ids: tuple[int, ...]
    turn: int
    finish: FinishReason
    tool_calls: tuple[ToolCall, ...] = ()
    tool_problem: str | None = None


@frozen
class StepResult:
    """The answer to a turn.

    `reward` is this turn's, a float64 that float32 holds too; the rewards of its turns add up to the trajectory's, in float64. `done` is False
    exactly where `messages` go on: of roles user, tool and system, never assistant. `parts` are components of the reward, shown and never
    trained on. `token_rewards`, one per token of the action, stand for `reward` where a process is scored. `sampling` overrides `max_tokens`
    and `stop_strings` of the next turn. `info` is kept with the attempt; its `answer`, the text that the attempt settled on, is what attempts
    at a task vote by (`rollout/maj@k`). `columns` are further numbers, each one per token of the action, or one for the turn: those that the
    environment's claims name.
    """

    reward: float
    done: bool = True
    messages: tuple[Message, ...] = ()
    parts: Mapping[str, float] = Factory(dict)
    metrics: Mapping[str, float] = Factory(dict)
    success: bool | None = None
    info: Mapping[str, Any] = Factory(dict)
    token_rewards: tuple[float, ...] | None = None
    sampling: Mapping[str, Any] = Factory(dict)
    columns: Mapping[str, tuple[float, ...] | float] = Factory(dict)


@frozen
class EndedAttempt:
    """An attempt at a task, as it is compared with the others of its group.

    `text` is the model's last turn, as in `Action`; `messages` are the whole dialogue, those of the task first, as environments see it.
    """

    text: str
    messages: tuple[Message, ...] = ()


class Episode(Protocol):
    """One attempt at a task. Its methods may be coroutines."""

    def begin(self) -> "tuple[Message, ...] | Awaitable[tuple[Message, ...]]":
        """Messages that follow those of the task, before the model's first turn."""

    def step(self, action: Action) -> "StepResult | Awaitable[StepResult]":
        """Answer a turn of the model."""

    def close(self) -> "Awaitable[None] | None":
        """Free what the episode holds; always called, also after a failure, and a second call does nothing."""


class Tasks(Protocol):
    """Tasks by number: a pure function of the number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


def _refuse_unknown_columns(_instance: object, _attribute: object, names: tuple[str, ...]) -> None:
    if (wrong := find_unknown_column(names)) is not None:
        raise ContractError(wrong, remedy="Name columns of skyrl_engine.contracts.values.rollout_columns in the claims, or none")


def _refuse_order_of_nothing(claims: "EnvironmentClaims", _attribute: object, order_matters: bool) -> None:
    if order_matters and not claims.compares:
        raise ContractError(
            "claims order_matters and not compares: no attempt has a place", remedy="Claim compares too, or neither"
        )


@frozen
class EnvironmentClaims:
    """The facts that an environment declares about itself, which planning reads and the kit holds it to.

    `max_turns` bounds an episode. A `random` environment may answer the same turns of the same seed differently, and resumes are not exact with
    it. `shared_tasks` says that train and eval share tasks. `pass_threshold` None says that nobody judges attempts: none is a success, none a
    failure. `columns` are the numbers per token that every answer to a turn gives, which parts of a run may then need: names of
    `skyrl_engine.contracts.values.rollout_columns`, such as "teacher_logprobs". One that `compares` has the method `compare`, of
    `ComparingEnvironment`; with `order_matters` it may reward an attempt otherwise in another place of its group, such as where each meets only
    the next one.
    """

    max_turns: int = field(default=1)
    random: bool = False
    shared_tasks: bool = False
    pass_threshold: float | None = 1.0
    version: str = ""
    columns: tuple[str, ...] = field(default=(), validator=_refuse_unknown_columns)
    compares: bool = False
    order_matters: bool = field(default=False, validator=_refuse_order_of_nothing)

    def succeeds(self, reward: float) -> bool | None:
        """Say if an attempt of this reward is a success; None where nobody judges."""
        return None if self.pass_threshold is None else reward >= self.pass_threshold


class Environment(Protocol):
    """The product of `skyrl_engine_make_environment`. An attempt whose episode does not say succeeds with a reward >= `pass_threshold`."""

    claims: EnvironmentClaims

    def tasks(self, split: Split) -> Tasks:
        """The tasks to train on, or those held out. Raises DataError where there are none to read."""

    def open(self, task: Task, seed: int) -> Episode:
        """Start an attempt; `seed` (uint64) is all it may draw from."""


class ComparingEnvironment(Environment, Protocol):
    """An environment whose `claims.compares` is true: it sees the attempts of a group together when all have ended, such as for a judge that is
    shown two answers.
    """

    def compare(self, task: Task, attempts: Sequence[EndedAttempt]) -> "Sequence[StepResult] | Awaitable[Sequence[StepResult]]":
        """Return one answer per attempt, in their order; its `reward`, `parts`, `metrics` and `info` are added to the attempt's own.

        `attempts` are those that did not fail, two or more: one that is left alone is compared with nothing, and gets nothing. Their order
        changes no reward, and equal attempts have equal rewards, unless the claims say `order_matters`.
        """
