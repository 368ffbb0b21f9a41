"""Tasks of an environment under test, turns that a model might take, and episodes played by hand."""

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

import attrs
from attrs import define, field, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.environment import Action, Environment, Episode, Split, StepResult, Task, Tasks, ToolCall
from skyrl_engine.contracts.values.rollout import FinishReason
from skyrl_engine.errors import EngineError
from skyrl_engine.rollout.episode_process import wrong_messages, wrong_with
from skyrl_engine.testing.process_settings import restore_settings
from skyrl_engine.testing.promise import Undecidable
from skyrl_engine.testing.subject import Subject

SPLITS: tuple[Split, ...] = ("train", "eval")

LOOKED_AT = 200
"""Tasks per split that are compared with each other."""

MOST_TURNS = 1000
"""An episode that may take more turns is not played to its end."""

ORDINARY = ("0", "1", "2", "7", "yes", "no", "up", "the answer is 4", "<answer>4</answer>", "\\boxed{4}", "A", "x" * 40)
"""Texts that some environment takes for an answer."""


@frozen
class Turn:
    """A turn of a model. `what` is the text itself, the solution of the task, what the prompt says, or calls of all tools of the task."""

    what: Literal["text", "solution", "prompt", "calls"]
    text: str = ""
    problem: str | None = None
    finish: FinishReason = "stop"

    def __str__(self) -> str:
        return f"{self.text!r:.80}" if self.what == "text" else f"({self.what})"


@frozen
class Script:
    """A task by its number, which counts on from 0 when the tasks end, a seed, and turns, of which the last one is said again and again."""

    split: Split
    number: int
    seed: int
    turns: tuple[Turn, ...]

    def __str__(self) -> str:
        return f"task {self.number} of {self.split}, seed {self.seed}, turns: {', '.join(map(str, self.turns))}"

    def turn(self, number: int) -> Turn:
        """Return the model's turn of this number."""
        return self.turns[min(number, len(self.turns) - 1)]


@frozen
class Pair:
    """Two scripts side by side, and which of them has the word: False the first, True the second; what is left comes after that."""

    one: Script
    other: Script
    order: tuple[bool, ...]

    def __str__(self) -> str:
        order = "".join("ab"[second] for second in self.order)
        return f"a: {self.one}\nb: {self.other}\nin the order {order}, then what is left of a and of b"


def scripts(_subject: Subject[Any]) -> "st.SearchStrategy[Script]":
    """Draw scripts: mostly texts, among them the solution and what the prompt says."""
    ordinary = st.sampled_from(ORDINARY).map(lambda text: Turn("text", text))
    special = st.sampled_from((Turn("solution"), Turn("prompt"), Turn("calls")))
    turns = st.lists(
        st.one_of(ordinary, special, st.text(max_size=12).map(lambda text: Turn("text", text))), min_size=1, max_size=4
    )
    return st.builds(Script, st.just("train"), st.integers(0, 99), st.integers(0, 2**64 - 1), turns.map(tuple))


def pairs(subject: Subject[Any]) -> "st.SearchStrategy[Pair]":
    """Draw two scripts, half of the time of one task, and their order."""
    order = st.lists(st.booleans(), min_size=4, max_size=12).map(tuple)
    one = scripts(subject)
    other = st.tuples(one, st.booleans())

    def pair(drawn: tuple[Script, tuple[Script, bool], tuple[bool, ...]]) -> Pair:
        first, (second, same_task), order = drawn
        return Pair(first, attrs.evolve(second, number=first.number) if same_task else second, order)

    return st.tuples(one, other, order).map(pair)


def tasks_of(environment: Environment, split: Split) -> Tasks:
    """Return the tasks of a split. Raises Undecidable where there are none to read, and for training none at all."""
    try:
        tasks = environment.tasks(split)
        count = len(tasks)
    except Exception as error:
        raise Undecidable(f"tasks({split!r}) fails: {format_error(error)}") from error
    if split == "train" and not count:
        raise Undecidable("there is no task to train on")
    return tasks


def pick_tasks(tasks: Tasks, most: int = LOOKED_AT) -> list[tuple[int, Task]]:
    """Return tasks with their numbers: all, or so many of them, the first, the last and others spread evenly."""
    count = len(tasks)
    numbers = range(count) if count <= most else sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})
    try:
        return [(number, tasks[number]) for number in numbers]
    except Exception as error:
        raise Undecidable(f"a task cannot be made: {format_error(error)}") from error


def task_for(environment: Environment, script: Script) -> Task:
    """Return the script's task."""
    tasks = tasks_of(environment, script.split)
    try:
        return tasks[script.number % len(tasks)]
    except Exception as error:
        raise Undecidable(f"a task cannot be made: {format_error(error)}") from error


def to_plain(value: Any) -> Any:
    """Return an attrs object as JSON values, as it travels between processes. Raises Undecidable for other values."""
    try:
        return json.loads(json.dumps(attrs.asdict(value), allow_nan=False, default=_number))
    except (TypeError, ValueError) as error:
        raise Undecidable(f"a value is none of JSON: {format_error(error)}") from error


def _number(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def format_error(error: BaseException) -> str:
    """Return an error in a line."""
    text = error.cause if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def has_solver(subject: Subject[Any]) -> bool:
    """Return True where somebody knows solutions: the environment, or the suite."""
    return "solve" in subject.hooks or callable(getattr(subject.make(), "solve", None))


def solution_of(subject: Subject[Any], environment: Any, task: Task) -> tuple[str, ...] | None:
    """Return the turns that solve a task; None where nobody knows them."""
    solve: Callable[[Task], Any] | None = subject.hooks.get("solve") or getattr(environment, "solve", None)
    try:
        solution = None if solve is None else solve(task)
    except Exception as error:
        raise Undecidable(f"solve fails: {format_error(error)}") from error
    return (solution,) if isinstance(solution, str) else None if solution is None else tuple(solution)


def read_prompt_text(task: Task) -> str:
    """Return all that the prompt of a task says."""
    return "\n".join(str(message.get("content", "")) for message in task.messages)


@define(eq=False)
class Stage:
    """Plays one episode of an environment by hand."""

    subject: Subject[Any]
    environment: Any
    task: Task
    seed: int
    _loop: asyncio.AbstractEventLoop
    episode: Episode = field(init=False)
    turn: int = field(default=0, init=False)
    last: Action | None = field(default=None, init=False)
    done: bool = field(default=False, init=False)

    def open(self) -> None:
        """Start the attempt."""
        self.episode = self.environment.open(self.task, self.seed)

    def begin(self) -> Any:
        """Return what comes before the first turn, whatever it is."""
        return self._await_value(self.episode.begin())

    def say(self, turn: Turn) -> Any:
        """Take a turn and return the answer, whatever it is."""
        self.last = self.action(turn)
        result = self._await_value(self.episode.step(self.last))
        self.turn += 1
        self.done = not isinstance(result, StepResult) or bool(result.done)
        return result

    def close(self) -> None:
        """Close the episode."""
        self._await_value(self.episode.close())

    def action(self, turn: Turn) -> Action:
        """Return a turn as the engine hands it over."""
        text, calls = turn.text, tuple[ToolCall, ...]()
        if turn.what == "prompt":
            text = read_prompt_text(self.task)
        if turn.what == "solution":
            solution = solution_of(self.subject, self.environment, self.task) or ("4",)
            text = solution[min(self.turn, len(solution) - 1)]
        if turn.what == "calls":
            calls = tuple(ToolCall(str(tool["function"]["name"]), {}, f"call_{self.turn}") for tool in self.task.tools)
            text = "".join(f"<tool_call>{json.dumps({'name': call.name, 'arguments': {}})}</tool_call>" for call in calls)
        tokens = tuple(byte for byte in text.encode("utf-8", "replace")[:64]) or (0,)
        return Action(text, tokens, self.turn, turn.finish, calls, turn.problem)

    def _await_value(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


@contextmanager
def stages(subject: Subject[Any], environment: Any) -> Iterator[Callable[[Task, int], Stage]]:
    """Yield what opens episodes; all are closed in the end, whatever happened, and what they changed of the process is put back."""
    with restore_settings(), stages_without_restore(subject, environment) as stage:
        yield stage


@contextmanager
def stages_without_restore(subject: Subject[Any], environment: Any) -> Iterator[Callable[[Task, int], Stage]]:
    """Do as `stages`, and leave what episodes changed of the process."""
    loop, opened = asyncio.new_event_loop(), list[Stage]()

    def stage(task: Task, seed: int) -> Stage:
        new_stage = Stage(subject, environment, task, seed, loop)
        new_stage.open()
        opened.append(new_stage)
        return new_stage

    try:
        yield stage
    finally:
        for opened_stage in opened:
            with suppress(Exception):
                opened_stage.close()
        loop.close()


def answer(stage: Stage, turn: Turn | None) -> Mapping[str, Any]:
    """Begin (None) or take a turn, and return the answer as JSON values. Raises Undecidable for a failure and for what is no answer."""
    try:
        if turn is None:
            messages = stage.begin()
            wrong = wrong_messages(messages, "begin")
            result: Any = messages
        else:
            result = stage.say(turn)
            tokens = 0 if stage.last is None else len(stage.last.token_ids)
            wrong = wrong_with(result, tokens=tokens, claimed=stage.environment.claims.columns)
        if wrong is None:
            return {"messages": [dict(message) for message in result]} if turn is None else dict(to_plain(result))
    except Undecidable:
        raise
    except Exception as error:
        raise Undecidable(f"an episode fails: {format_error(error)}") from error
    raise Undecidable(wrong)


def play(subject: Subject[Any], environment: Any, script: Script, *, turns: int = 8) -> list[Mapping[str, Any]]:
    """Play a script, at most so many turns of it, and return the answers."""
    task = task_for(environment, script)
    most = min(turns, environment.claims.max_turns)
    try:
        with stages(subject, environment) as open_stage:
            stage = open_stage(task, script.seed)
            answers = [answer(stage, None)]
            while not stage.done and stage.turn < most:
                answers.append(answer(stage, script.turn(stage.turn)))
            return answers
    except Undecidable:
        raise
    except Exception as error:
        raise Undecidable(f"an episode cannot be opened: {format_error(error)}") from error


def reward_of(result: Mapping[str, Any]) -> float:
    """Return the reward of an answer, which tokens may hold."""
    token_rewards = result["token_rewards"]
    return float(result["reward"]) if token_rewards is None else math.fsum(token_rewards)


def play_for_reward(subject: Subject[Any], environment: Any, script: Script) -> tuple[float, bool]:
    """Play a script to its end; return the sum of its rewards, and whether that is a success."""
    results = play(subject, environment, script, turns=MOST_TURNS)[1:]
    reward = math.fsum(map(reward_of, results))
    success = next((result["success"] for result in reversed(results) if result["success"] is not None), None)
    return reward, bool(environment.claims.succeeds(reward) if success is None else success)


def shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:160]}..."
