"""Promises about the tasks of every environment."""

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.environment import Task
from skyrl_engine.rollout.episode_process import ROLES, task_of
from skyrl_engine.testing.another_process import ask, ask_in_other_orders
from skyrl_engine.testing.environments.bench import (
    LOOKED_AT,
    SPLITS,
    Script,
    Turn,
    format_error,
    pick_tasks,
    play,
    read_prompt_text,
    shorten,
    tasks_of,
    to_plain,
)
from skyrl_engine.testing.environments.compared import TEXTS, compare_group, group_of
from skyrl_engine.testing.promise import Broken, promise
from skyrl_engine.testing.subject import Subject

PROMPT_BYTES = 4 * 1024
"""A prompt of more bytes is likely longer than 1,024 tokens, the default of `rl.max_prompt_tokens`."""


@promise("Every task is a prompt of plain JSON values: messages, of which the model's is next, or tokens")
def well_formed(subject: Subject[Any], _case: None) -> None:
    environment = subject.make()
    for split in SPLITS:
        try:
            tasks = environment.tasks(split)
            count = len(tasks)
            numbered_tasks = pick_tasks(tasks)
        except Exception as error:
            raise Broken(f"its tasks cannot be read: {format_error(error)}", "Correct it, or its options") from error
        if split == "train" and not count:
            raise Broken("has no task to train on", "Check its options")
        for number, task in numbered_tasks:
            wrong = _wrong_task(task)
            if wrong is not None:
                raise Broken(f"task {number} of {split} {wrong}", "Give every task a key, and messages or tokens, of JSON values")
        _warn_of_long_prompts(split, [len(read_prompt_text(task).encode()) for _, task in numbered_tasks])


def _wrong_task(task: Any) -> str | None:
    if not isinstance(task, Task):
        return f"is {task!r:.80}, which is no Task"
    if not isinstance(task.key, str) or not task.key:
        return f"has the key {task.key!r:.80}, which is no text"
    if bool(task.messages) == bool(task.prompt_ids):
        return f"({task.key}) has {'both' if task.messages else 'neither'} messages {'and' if task.messages else 'nor'} prompt_ids"
    for message in task.messages:
        if not isinstance(message.get("content"), str) or message.get("role") not in (*ROLES, "assistant"):
            return f"({task.key}) has the message {message!r:.120}, whose role or content is none"
    if task.messages and task.messages[-1]["role"] == "assistant":
        return f"({task.key}) ends with a message of the assistant"
    if task.images:
        return f"({task.key}) has images, which are not supported yet"
    try:
        again = task_of(json.loads(json.dumps(attrs.asdict(task), allow_nan=False)))
    except (TypeError, ValueError) as error:
        return f"({task.key}) is not of JSON values: {format_error(error)}"
    if to_plain(again) != to_plain(task):
        return f"({task.key}) is another one after it went through JSON"
    other = next((key for key in _keys(attrs.asdict(task)) if not isinstance(key, str)), "")
    return None if other == "" else f"({task.key}) has a table with the key {other!r:.80}, of which JSON makes a text"


def _keys(value: Any) -> Iterator[object]:
    """Yield the keys of all tables in a value."""
    if isinstance(value, Mapping):
        yield from value
    for inside in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _keys(inside)


def _warn_of_long_prompts(split: str, sizes: list[int]) -> None:
    long = sum(size > PROMPT_BYTES for size in sizes)
    if long > len(sizes) / 100:
        warnings.warn(
            f"{long} of {len(sizes)} tasks of {split} have a prompt of more than {PROMPT_BYTES:,} bytes (the longest has {max(sizes):,}), "
            "about 1,024 tokens: raise rl.max_prompt_tokens, or leave such tasks out",
            stacklevel=2,
        )


@promise("A task is a function of its number: the same again, in any order, in another object, after pickling and as JSON")
def same_tasks(subject: Subject[Any], _case: None) -> None:
    one, other = subject.make(), subject.make()
    for split in SPLITS:
        tasks, other_tasks = tasks_of(one, split), tasks_of(other, split)
        if len(tasks) != len(other_tasks):
            raise Broken(
                f"has {len(tasks):,} tasks of {split}, and {len(other_tasks):,} when it is made again", "Take nothing but options"
            )
        first = {number: to_plain(task) for number, task in pick_tasks(tasks, 40)}
        for number in reversed(first):
            repeats = {"in another object": other_tasks[number], "when it is asked for again": tasks[number]}
            repeats["after pickling"] = pickle.loads(pickle.dumps(repeats["in another object"]))  # noqa: S301 -- our own
            for when, task in repeats.items():
                if to_plain(task) != first[number]:
                    raise Broken(
                        f"task {number} of {split} is {shorten(to_plain(task))} {when}, and was {shorten(first[number])}",
                        "Draw each task from a seed of its own, such as (seed, number), and not from one stream",
                    )


@promise("Another process has the same tasks, answers turns and compares attempts in the same way")
def same_in_another_process(subject: Subject[Any], _case: None) -> None:
    environment = subject.make()
    script = Script("train", 0, 7, (Turn("text", "4"), Turn("text", "yes"), Turn("prompt")))
    here = {split: [to_plain(task) for _, task in pick_tasks(tasks_of(environment, split), 8)] for split in SPLITS}
    answers = [] if environment.claims.random else play(subject, subject.make(), script)
    comparison = _compare(subject, subject.make())
    for there in (
        [ask(_collect_answers, None, environment)]
        if subject.plugin is None
        else ask_in_other_orders(subject.plugin, _collect_answers, subject.plugin.to_lock_entry(), None)
    ):
        _require_same_elsewhere({"tasks": here, "answers": answers, "comparison": comparison}, there)


def _require_same_elsewhere(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    for split in SPLITS:
        for mine, theirs in zip(here["tasks"][split], there["tasks"][split], strict=True):
            if mine != theirs:
                raise Broken(
                    f"a task of {split} is {shorten(theirs)} in another process, and {shorten(mine)} here",
                    "Let tasks depend on options alone: not on hash(), the rank, the time, sets, or the order of a folder",
                )
    for what, answers in (("an episode answers", "answers"), ("a comparison of attempts gives", "comparison")):
        if there[answers] != here[answers]:
            raise Broken(
                f"{what} {shorten(there[answers])} in another process, and {shorten(here[answers])} here",
                "Let answers depend on task, seed and turns alone: not on hash(), the rank, the time or sets",
            )


def _compare(subject: Subject[Any], environment: Any) -> list[Mapping[str, Any]]:
    """Return what a comparison of some attempts gives each; nothing where there is none, or another one each time."""
    claims = environment.claims
    return compare_group(subject, environment, group_of(TEXTS)) if claims.compares and not claims.random else []


def _collect_answers(lock: dict[str, Any] | None, environment: Any) -> dict[str, Any]:
    """Return tasks and answers of an environment, given as the lock of its plugin or itself, in the process that asks for it."""
    subject: Subject[Any] = (
        Subject("elsewhere", lambda: environment) if lock is None else Subject.of_plugin(SelectedPlugin.from_lock(lock))
    )
    environment = subject.make()
    tasks = {split: [to_plain(task) for _, task in pick_tasks(tasks_of(environment, split), 8)] for split in SPLITS}
    script = Script("train", 0, 7, (Turn("text", "4"), Turn("text", "yes"), Turn("prompt")))
    answers = [] if environment.claims.random else play(subject, subject.make(), script)
    return {"tasks": tasks, "answers": answers, "comparison": _compare(subject, subject.make())}


@promise(
    "Keys are unique, no key to train on is held out, and no more than half of the held-out prompts are to train on, unless it claims "
    "shared_tasks"
)
def keys(subject: Subject[Any], _case: None) -> None:
    environment = subject.make()
    seen: dict[str, dict[str, int]] = {}
    prompts: dict[str, set[int]] = {}
    share_read = 1.0
    for split in SPLITS:
        tasks = tasks_of(environment, split)
        picked = pick_tasks(tasks, 100 * LOOKED_AT)
        if split == "train":
            share_read = len(picked) / len(tasks)
        seen[split], prompts[split] = {}, {hash(_prompt(task)) for _, task in picked}
        for number, task in picked:
            if task.key in seen[split]:
                raise Broken(
                    f"tasks {seen[split][task.key]} and {number} of {split} both have the key {task.key!r:.80}",
                    "Give every task a key of its own: results are compared and resumed by it",
                )
            seen[split][task.key] = number
    if environment.claims.shared_tasks or not seen["eval"]:
        return
    both = [key for key in seen["train"] if key in seen["eval"]]
    if both:
        raise Broken(
            f"{len(both)} keys are among the tasks to train on and among those held out, such as {both[0]!r:.80}",
            "Hold other tasks out, or claim shared_tasks",
        )
    shared = prompts["train"] & prompts["eval"] if len(prompts["eval"]) > 1 else set()
    # a procedure meets the same question twice now and then; a copy does it all the time
    if 2 * len(shared) > share_read * len(prompts["eval"]):
        of_those = "" if share_read == 1.0 else f", of which {share_read:.0%} were read"
        raise Broken(
            f"{len(shared)} of {len(prompts['eval'])} held-out prompts are prompts to train on{of_those}",
            "Hold other tasks out, or claim shared_tasks",
        )


def _prompt(task: Task) -> str:
    """Return what makes tasks the same: prompt and data, without numbers that only name the task."""
    data = {name: value for name, value in task.data.items() if name not in ("split", "number", "key", "id")}
    return json.dumps([to_plain(task)["messages"], list(task.prompt_ids), data], sort_keys=True, default=str)
