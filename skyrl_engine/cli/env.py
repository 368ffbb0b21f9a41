"""`skyrl-engine env list|show|try`: environments, their tasks, and what they pay for an answer, without a model."""

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyrl_engine.cli.command import EngineGroup
from skyrl_engine.cli.key_values import options_argument
from skyrl_engine.cli.read_keys import NO_KEYS
from skyrl_engine.cli.terminal import echo, echo_json

if TYPE_CHECKING:
    from skyrl_engine.config import SelectedPlugin
    from skyrl_engine.contracts import Action, Environment, Message, StepResult, Task
    from skyrl_engine.registry.bound_plugin import BoundPlugin
    from skyrl_engine.registry.record import PluginRecord

_JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")


@click.group(cls=EngineGroup)
def env() -> None:
    """List environments, show one, answer one of its tasks by hand."""


@env.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_environments(*, as_json: bool) -> None:
    """List every installed environment with its distribution and version. Imports none of them."""
    from skyrl_engine.registry.resolve import Registry

    records = Registry.discover().records("environment")
    if as_json:
        facts = [{"name": record.name, "distribution": record.distribution, "version": record.version} for record in records]
        echo_json(facts)
        return
    from skyrl_engine.cli.render import show_table

    show_table(
        ("name", "distribution", "version"), [(record.name, record.distribution or "", record.version or "") for record in records]
    )


@env.command("show", reads=NO_KEYS)
@click.argument("name", metavar="NAME")
@options_argument
@_JSON
def show_environment(name: str, overrides: tuple[str, ...], *, as_json: bool) -> None:
    """Show the options of an environment, its claims, how many tasks it has, and the first of them with what its episode says at the start.

    NAME is as for `rl --env`: spell, acme-environments:spell, ./file.py:spell, reasoning_gym:spell_backward. While options that it needs are
    not given, its options alone are shown.
    """
    import attrs

    from skyrl_engine.cli.plugin_options import option_rows
    from skyrl_engine.errors import DataError
    from skyrl_engine.registry.loader import load
    from skyrl_engine.rollout.process_handle import refuse_unsendable
    from skyrl_engine.training.rl.tasks import task_at, tasks_in

    record, table = _find_environment(name)
    loaded = load(record)
    options = option_rows(loaded)
    needed = [option["name"] for option in options if option["default"] == "required"]
    if not overrides and not table and needed:
        _show_options_alone(name, record, options, needed, as_json=as_json)
        return
    plugin, part = _make_environment(name, overrides)
    environment, tasks = part.product, tasks_in(part, "train")
    sizes = {"train": len(tasks), "eval": len(tasks_in(part, "eval"))}
    if not any(sizes.values()):
        raise DataError(f"{part.label} has no task", remedy="Check the environment's options")
    first = task_at(part, tasks, 0) if sizes["train"] else None
    first_turn: tuple[Any, ...] = ()
    if first is not None:
        refuse_unsendable(first, f"{part.label}: task {first.key!r}")
        with _blame_episode(name, first):
            first_turn, _, _ = asyncio.run(_play(environment, name, first, 0, ()))
    facts = {
        "environment": part.label,
        **attrs.asdict(environment.claims),
        "tasks": sizes["train"],
        "held_out": sizes["eval"],
        "solutions": callable(getattr(environment, "solve", None)),
    }
    if as_json:
        task = None if first is None else attrs.asdict(first)
        first_messages = [dict(message) for message in first_turn]
        report = {**facts, "options": dict(plugin.table), "takes": options, "first_task": task, "begin": first_messages}
        echo_json(report, ensure_ascii=False)
        return
    from skyrl_engine.cli.render import show_facts, show_heading

    show_facts({label.replace("_", " "): _yes_or_no(value) for label, value in facts.items()})
    _show_options(options)
    if first is not None:
        show_heading("First task")
        _show_task(first)
        _show_messages(first_turn)


@env.command("try", reads=NO_KEYS)
@click.argument("name", metavar="NAME")
@options_argument
@click.option(
    "--answer",
    "answers",
    multiple=True,
    metavar="TEXT",
    help="What the model says; again for further turns. `-` reads it from stdin. Without it, the solution.",
)
@click.option("--task", "number", type=click.IntRange(min=0), default=0, show_default=True, metavar="NUMBER", help="The task.")
@click.option("--split", type=click.Choice(["train", "eval"]), default="train", show_default=True, help="Its split.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="SEED", help="Seed of the attempt.")
@_JSON
def try_environment(
    name: str, overrides: tuple[str, ...], answers: tuple[str, ...], *, number: int, split: Any, seed: int, as_json: bool
) -> None:
    """Answer one task of an environment by hand, and show what it pays.

    NAME is as for `rl --env`; `skyrl-engine evaluate --model M --env NAME` lets a model answer. The last TEXT is said again where an attempt
    takes more turns than there are. A TEXT may call a tool of the task:
    `<tool_call>{"name": "look_up", "arguments": {"word": "x"}}</tool_call>`.
    """
    import attrs

    from skyrl_engine.training.rl.tasks import task_at, tasks_in

    _, part = _make_environment(name, overrides)
    environment, tasks = part.product, tasks_in(part, split)
    if number >= len(tasks):
        raise click.UsageError(f"There is no task {number:,}: {split} has {len(tasks):,}.")
    task = task_at(part, tasks, number)
    texts = _with_stdin(answers) or _solution(environment, task)
    with _blame_episode(name, task):
        first_turn, turns, success = asyncio.run(_play(environment, name, task, seed, texts))
    reward = math.fsum(
        amount for _, result in turns for amount in ((result.reward,) if result.token_rewards is None else result.token_rewards)
    )
    if success is None:
        success = environment.claims.succeeds(reward)
    if as_json:
        report = {
            "task": attrs.asdict(task),
            "begin": [dict(message) for message in first_turn],
            "turns": [{"said": action.text, **_calls(action), "result": attrs.asdict(result)} for action, result in turns],
            "reward": reward,
            "success": success,
            "compares": environment.claims.compares,
        }
        echo_json(report, ensure_ascii=False, default=float)
        return
    from skyrl_engine.cli.render import show_facts, show_heading

    show_heading(f"Task {task.key}")
    _show_task(task)
    _show_messages(first_turn)
    for turn, (action, result) in enumerate(turns):
        show_heading(f"Turn {turn}")
        echo(f"assistant: {action.text}")
        for call in action.tool_calls:
            echo(f"calls {call.name}: {json.dumps(call.arguments, ensure_ascii=False)}")
        if action.tool_problem is not None:
            echo(f"cannot be read as a call: {action.tool_problem}")
        for message in result.messages:
            echo(f"{message['role']}: {message['content']}")
        show_facts(
            {
                "reward": f"{result.reward:g}",
                **{f"part {part}": f"{value:g}" for part, value in result.parts.items()},
                **result.metrics,
                **{f"column {name}": f"{values!s:.80}" for name, values in result.columns.items()},
            }
        )
    show_heading("Attempt")
    show_facts({"reward": f"{reward:g}", "success": "nobody judges" if success is None else _yes_or_no(success)})
    if environment.claims.compares:
        echo("The environment compares the attempts at a task when all have ended: one alone is compared with nothing.")


@contextmanager
def _blame_episode(name: str, task: "Task") -> Iterator[None]:
    """Turn what an episode raises into a RolloutError that names the place."""
    from skyrl_engine.errors import EngineError, RolloutError
    from skyrl_engine.registry.owner import describe, place_of

    try:
        yield
    except EngineError:
        raise
    except (Exception, SystemExit) as error:
        raise RolloutError(
            f"{name}, task {task.key!r}: {describe(error)}",
            remedy="Correct that place: in a run, the attempt fails",
            details=[place_of(error)],
        ) from error


def _show_options(options: list[dict[str, str]]) -> None:
    from skyrl_engine.cli.plugin_options import OPTION_COLUMNS
    from skyrl_engine.cli.render import show_heading, show_table

    show_heading("Options")
    if options:
        show_table(OPTION_COLUMNS, [tuple(option.values()) for option in options])
    else:
        echo("It takes no options.")


def _show_options_alone(
    name: str, record: "PluginRecord", options: list[dict[str, str]], needed: list[str], *, as_json: bool
) -> None:
    """Show what an environment takes that cannot be made yet, and how to give what it needs."""
    if as_json:
        echo_json({"environment": str(record), "options": {}, "takes": options}, ensure_ascii=False)
        return
    from skyrl_engine.cli.render import show_facts

    show_facts({"environment": str(record)})
    _show_options(options)
    echo(f"\nFor its tasks, give what it needs: skyrl-engine env show {name} {' '.join(f'{option}=VALUE' for option in needed)}")


def _yes_or_no(value: Any) -> Any:
    """Return a fact for people: a truth value as yes or no, names as a list."""
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _find_environment(name: str) -> "tuple[PluginRecord, dict[str, Any]]":
    """Return the environment that a name as of `--env` means, and the options that the name itself gives."""
    from skyrl_engine.cli.rl import environment_table
    from skyrl_engine.registry.resolve import Registry

    table = environment_table(name)
    return Registry.discover().resolve("environment", table.pop("use"), base=Path.cwd()), table


def _make_environment(name: str, overrides: tuple[str, ...]) -> "tuple[SelectedPlugin, BoundPlugin[Environment]]":
    from skyrl_engine.cli.plugin_options import parse_options, select_plugin
    from skyrl_engine.contracts import FactoryContext
    from skyrl_engine.registry.bound_plugin import BoundPlugin
    from skyrl_engine.registry.owner import Owner

    record, table = _find_environment(name)
    plugin = select_plugin(record, parse_options(overrides, table))
    return plugin, BoundPlugin(plugin.make(FactoryContext()), Owner.of(record), "", name)


def _with_stdin(answers: tuple[str, ...]) -> tuple[str, ...]:
    """Put the text of stdin, without its last line break, in the place of `-`."""
    if answers.count("-") > 1:
        raise click.UsageError("stdin is read once. Give --answer - once.")
    return tuple(sys.stdin.read().removesuffix("\n") if answer == "-" else answer for answer in answers)


def _solution(environment: "Environment", task: "Task") -> tuple[str, ...]:
    solve = getattr(environment, "solve", None)
    solution = None if solve is None else solve(task)
    if solution is None:
        raise click.UsageError("The environment knows no solution of this task. Give --answer TEXT.")
    return (solution,) if isinstance(solution, str) else tuple(solution)


def _calls(action: "Action") -> dict[str, Any]:
    """Return the tools that a turn calls, where it calls any, and what cannot be read of that."""
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in action.tool_calls]
    facts = {"tool_calls": calls, "tool_problem": action.tool_problem}
    return {name: value for name, value in facts.items() if value}


async def _play(
    environment: "Environment", name: str, task: "Task", seed: int, texts: tuple[str, ...]
) -> "tuple[tuple[Any, ...], list[tuple[Action, StepResult]], bool | None]":
    """Play an attempt; return its first messages, the turns with their answers, and whether it says of itself to be a success.

    Without `texts`, it ends at its start.
    """
    from skyrl_engine.contracts import Action
    from skyrl_engine.errors import ContractError
    from skyrl_engine.rollout.episode_process import wrong_messages, wrong_with
    from skyrl_engine.rollout.tool_calls import read_tool_calls, template_family

    def refuse(wrong: str | None) -> None:
        if wrong is not None:
            raise ContractError(
                f"{name}, task {task.key!r}: {wrong}", remedy="Correct the environment; `plugins verify` finds more"
            )

    episode = environment.open(task, seed)
    try:
        first_turn: Any = await _await_value(episode.begin())
        refuse(wrong_messages(first_turn, "begin"))
        turns: list[tuple[Action, StepResult]] = []
        success = None
        while texts and len(turns) < environment.claims.max_turns and (not turns or not turns[-1][1].done):
            text = texts[min(len(turns), len(texts) - 1)]
            tokens = tuple(text.encode()) or (0,)
            # there is no chat template: the call itself says in which way it is written
            calls, problem = read_tool_calls(text, template_family(text), task.tools) if task.tools else ((), None)
            action = Action(text, tokens, len(turns), "stop", calls, problem)
            result: Any = await _await_value(episode.step(action))
            refuse(wrong_with(result, tokens=len(tokens), claimed=environment.claims.columns))
            turns.append((action, result))
            success = success if result.success is None else result.success
        return tuple(first_turn), turns, success
    finally:
        await _await_value(episode.close())


async def _await_value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _show_task(task: "Task") -> None:
    _show_messages(task.messages)
    if task.prompt_ids:
        echo(f"tokens: {' '.join(map(str, task.prompt_ids))}")
    if task.tools:
        echo(f"tools: {', '.join(str(tool['function']['name']) for tool in task.tools)}")
    echo(f"data: {json.dumps(task.data, ensure_ascii=False, default=str)[:400]}")


def _show_messages(messages: "Sequence[Message]") -> None:
    for message in messages:
        echo(f"{message['role']}: {message['content']}")
