"""The process in which episodes of environments run: it answers one line of JSON with one line of JSON, and holds episodes in between.

Started as `python -m skyrl_engine.rollout.episode_process IN OUT` with two open file descriptors; what environments print goes elsewhere.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import attrs
import numpy as np
from attrs import define, field

from skyrl_engine.contracts.kinds.environment import Action, EndedAttempt, Environment, Episode, StepResult, Task, ToolCall
from skyrl_engine.contracts.values.returned import describe_returned
from skyrl_engine.contracts.values.rollout import LARGEST_REWARD
from skyrl_engine.contracts.values.rollout_columns import find_unknown_column, list_further_columns
from skyrl_engine.errors import EngineError
from skyrl_engine.registry.owner import place_of

ROLES = ("user", "tool", "system")

LARGEST = 2**24
"""Bytes of an answer."""

LONGEST_CAUSE = 1000
"""Most characters of an environment's exception that are reported."""

LONGEST_TRACEBACK = 8000


@define(eq=False)
class EpisodeServer:
    """Environments and their open episodes. `handle` takes a request and returns the answer, both of plain JSON values."""

    environments: Sequence[Environment]
    _episodes: dict[int, Episode] = field(factory=dict, init=False)
    _claimed: dict[int, tuple[str, ...]] = field(factory=dict, init=False)
    """By episode, the columns that its environment claims to give."""
    _loop: asyncio.AbstractEventLoop = field(factory=asyncio.new_event_loop, init=False)

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked. Whatever an environment raises becomes `{"failure": cause}`."""
        episode = request["episode"]
        try:
            match request["do"]:
                case "open":
                    return {"messages": self._open(request)}
                case "compare":
                    return {"results": self._compare(request)}
                case "step":
                    return {"result": self._step(episode, _action(request["action"]))}
                case _:
                    self._close(episode)
                    return {}
        except EngineError as error:
            return {"failure": _escape_surrogates(error.cause)[:LONGEST_CAUSE]}
        except Exception as error:  # noqa: BLE001 -- an environment may raise anything
            return {
                "failure": _format_error(error),
                "traceback": _escape_surrogates(traceback.format_exc(limit=-8))[:LONGEST_TRACEBACK],
            }

    def _open(self, request: Mapping[str, Any]) -> list[Any]:
        environment = self.environments[request["environment"]]
        opened = environment.open(task_of(request["task"]), request["seed"])
        if lacking := [name for name in ("begin", "step", "close") if not callable(getattr(opened, name, None))]:
            raise AnswerError(f"open returned {describe_returned(opened)}, which is no Episode: it has no method {lacking[0]}")
        self._episodes[request["episode"]] = opened
        self._claimed[request["episode"]] = environment.claims.columns
        return _messages(self._await_value(opened.begin()), "begin")

    def _compare(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        environment: Any = self.environments[request["environment"]]
        attempts = [EndedAttempt(attempt["text"], tuple(attempt["messages"])) for attempt in request["attempts"]]
        results = self._await_value(environment.compare(task_of(request["task"]), attempts))
        if (wrong := wrong_comparison(results, len(attempts))) is not None:
            raise AnswerError(wrong)
        return [_to_table(result) for result in results]

    def _step(self, number: int, action: Action) -> dict[str, Any]:
        result = self._await_value(self._episodes[number].step(action))
        wrong = wrong_with(result, tokens=len(action.token_ids), claimed=self._claimed[number])
        if wrong is not None:
            raise AnswerError(wrong)
        return _to_table(result)

    def _close(self, number: int) -> None:
        self._claimed.pop(number, None)
        if (episode := self._episodes.pop(number, None)) is not None:
            self._await_value(episode.close())

    def close_all(self) -> None:
        """Close the episodes that are still open, and take no more; what one of them raises keeps no other from it."""
        for number in list(self._episodes):
            try:
                self._close(number)
            except Exception:  # noqa: BLE001 -- an environment may raise anything
                traceback.print_exc()
        self._loop.close()

    def _await_value(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


class AnswerError(EngineError):
    """An environment answered with what is no answer."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, remedy="Return a StepResult with a finite reward")


def _format_error(error: Exception) -> str:
    """Return what an environment raised, and where, in one text, also where the exception cannot be made one."""
    try:
        words = str(error)
    except Exception as second:  # noqa: BLE001 -- an exception's text is the environment's own code
        words = f"its text cannot be made: {type(second).__name__}"
    return f"{type(error).__name__}: {_escape_surrogates(words)[:LONGEST_CAUSE]} ({_escape_surrogates(place_of(error))})"


def _escape_surrogates(text: str) -> str:
    """Return the text with half characters, which no file and no screen takes, written as their code."""
    return text.encode(errors="backslashreplace").decode()


def wrong_with(returned: Any, *, tokens: int, claimed: Sequence[str]) -> str | None:
    """Say what is wrong with an answer to a turn of so many tokens, given the columns that the environment claims; None where nothing is."""
    if not isinstance(returned, StepResult):
        return f"step returned {describe_returned(returned)} where a StepResult is due"
    checks = (
        wrong_numbers(returned, tokens=tokens),
        wrong_columns(returned, tokens=tokens, claimed=claimed),
        wrong_end(returned),
        wrong_messages(returned.messages, "step"),
        wrong_rest(returned),
    )
    return next((wrong for wrong in checks if wrong is not None), None)


def wrong_comparison(returned: Any, attempts: int) -> str | None:
    """Say what is wrong with the answers of `compare` about so many attempts; None where nothing is."""
    if isinstance(returned, str) or not isinstance(returned, Sequence) or len(returned) != attempts:
        return f"compare returned {returned!r:.80} where {attempts} results are due, one per attempt"
    for result in returned:
        if not isinstance(result, StepResult):
            return f"compare returned {describe_returned(result)} where a StepResult is due"
        if not result.done or result.messages or result.token_rewards is not None or result.columns or result.sampling:
            return "compare returned a result that goes on or is of tokens, where the attempts have ended"
        if (wrong := wrong_numbers(result, tokens=0) or wrong_rest(result)) is not None:
            return wrong
    return None


def wrong_numbers(result: Any, *, tokens: int) -> str | None:
    """Say which number of an answer is none, or is not finite."""
    for name, value in (("parts", result.parts), ("metrics", result.metrics)):
        if not isinstance(value, Mapping):
            return f"{name} is {value!r:.80}, where names with numbers are due"
    for name, value in (("reward", result.reward), *result.parts.items(), *result.metrics.items()):
        if not _is_number(value):
            return f"{name} is {value!r:.80}, where a finite number up to 3.4e+38 is due"
    rewards = result.token_rewards
    if rewards is None:
        return None
    if not isinstance(rewards, Sequence | np.ndarray) or len(rewards) != tokens or not all(map(_is_number, rewards)):
        return f"token_rewards is {rewards!r:.80}, where {tokens} finite numbers are due, one per token"
    return None


def wrong_columns(result: Any, *, tokens: int, claimed: Sequence[str]) -> str | None:
    """Say which further column of an answer to a turn of so many tokens is unknown, missing, or not of finite numbers."""
    if not isinstance(result.columns, Mapping):
        return f"columns is {result.columns!r:.80}, where names with numbers are due"
    if (wrong := find_unknown_column(list(result.columns))) is not None:
        return wrong
    if (extra := next((name for name in result.columns if name not in claimed), None)) is not None:
        return f"columns has {extra!r}, which the environment's claims do not name"
    if (missing := next((name for name in claimed if name not in result.columns), None)) is not None:
        return f"columns lacks {missing!r}, which the environment's claims name"
    for row in list_further_columns():
        values = result.columns.get(row.name, ())
        if row.per == "turn" and _is_number(values):
            continue
        is_list = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
        if row.name in claimed and not (is_list and len(values) == tokens and all(map(_is_number, values))):
            return f"columns has {row.name} = {values!r:.80}, where {tokens} finite numbers are due, one per token"
    return None


def wrong_end(result: Any) -> str | None:
    """Say where an answer is over and goes on, or neither."""
    if not isinstance(result.done, bool | np.bool_):
        return f"done is {result.done!r:.80}, where true or false is due"
    if result.done == bool(result.messages):
        return "done is true, and messages follow" if result.done else "done is false, and no message follows"
    return None


def wrong_messages(messages: Any, method: str) -> str | None:
    """Say which message is none that an environment may give."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f"{method} gave {messages!r:.120}, where a list of messages is due"
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            return f"{method} gave the message {message!r:.120}, which is not of the roles {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"{method} gave the message {message!r:.120}, whose content is no text"
    return None


def wrong_rest(result: Any) -> str | None:
    """Say what is wrong with success, info or sampling."""
    if not isinstance(result.success, bool | np.bool_ | None):
        return f"success is {result.success!r:.80}, where true, false or none is due"
    for name in ("info", "sampling"):
        if not isinstance(getattr(result, name), Mapping):
            return f"{name} is {getattr(result, name)!r:.80}, where names with values are due"
    for name, value in result.sampling.items():
        if name not in ("max_tokens", "stop_strings"):
            return f"sampling has {name!r}, and a turn may set max_tokens and stop_strings"
        most = name == "max_tokens" and isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not most and not (name == "stop_strings" and _are_texts(value)):
            return f"sampling has {name} = {value!r:.80}"
    return None


def _is_number(value: Any) -> bool:
    """Return True for a number that is finite as float32, which advantages are kept in; NumPy's too."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and abs(float(value)) <= LARGEST_REWARD
    except OverflowError:
        return False


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value)


def _messages(messages: Any, method: str) -> list[Any]:
    if (wrong := wrong_messages(messages, method)) is not None:
        raise AnswerError(wrong)
    return [dict(message) for message in messages]


def _to_table(result: StepResult) -> dict[str, Any]:
    table = {name: getattr(result, name) for name in attrs.fields_dict(StepResult)}
    numbers = ("parts", "metrics")
    rewards = result.token_rewards
    return {
        **table,
        "reward": float(result.reward),
        "done": bool(result.done),
        "success": None if result.success is None else bool(result.success),
        "messages": [dict(message) for message in result.messages],
        "token_rewards": None if rewards is None else [float(reward) for reward in rewards],
        "columns": {
            name: [float(value) for value in values] if isinstance(values, Sequence | np.ndarray) else float(values)
            for name, values in result.columns.items()
        },
        **{name: {str(key): float(value) for key, value in table[name].items()} for name in numbers},
    }


def _action(table: Mapping[str, Any]) -> Action:
    calls = tuple(ToolCall(**call) for call in table["tool_calls"])
    return Action(**{**table, "token_ids": tuple(table["token_ids"]), "tool_calls": calls})


def task_of(table: Mapping[str, Any]) -> Task:
    """Return the task that `attrs.asdict` made plain."""
    lists = ("messages", "prompt_ids", "tools", "images")
    return Task(**{**table, **{name: tuple(table[name]) for name in lists}})


def _line(answer: Mapping[str, Any]) -> bytes:
    try:
        line = json.dumps(answer, allow_nan=False, default=_of_numpy).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        return _failure(answer, f"the answer is not of JSON values: {error}")
    if len(line) > LARGEST:
        return _failure(answer, f"the answer has {len(line):,} bytes, and {LARGEST:,} are the most that is read")
    return line


def _of_numpy(value: Any) -> Any:
    """Return NumPy's numbers and arrays, and tensors, as plain numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _failure(answer: Mapping[str, Any], cause: str) -> bytes:
    return json.dumps({"id": answer["id"], "failure": cause}).encode() + b"\n"


def _write_all(descriptor: int, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(descriptor, view) :]


def _apart_in_forks(*descriptors: int) -> None:
    """Let a process that an environment forks neither take requests nor answer them, nor keep the connection open."""

    def cut() -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            os.dup2(nothing, descriptor)

    os.register_at_fork(after_in_child=cut)


def main(inwards: int, outwards: int) -> None:
    """Make the environments that the first line names, then answer line by line until the other side closes."""
    from skyrl_engine.config import SelectedPlugin
    from skyrl_engine.contracts.kinds.context import FactoryContext

    _apart_in_forks(inwards, outwards)
    with os.fdopen(inwards, "rb") as requests:
        setup = json.loads(requests.readline())
        try:
            context = FactoryContext(**setup["context"])
            environments = [SelectedPlugin.from_lock(lock).make(context) for lock in setup["locks"]]
        except EngineError as error:
            _write_all(outwards, _line({"id": -1, "failure": error.cause}))
            return
        _write_all(outwards, _line({"id": -1}))
        server = EpisodeServer(environments)
        for line in requests:
            request = json.loads(line)
            _write_all(outwards, _line({"id": request["id"], **server.handle(request)}))
        server.close_all()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
