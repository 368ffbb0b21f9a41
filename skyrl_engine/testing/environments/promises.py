"""Promises of every environment, as far as its claims go."""

import json
import os
import pickle
import subprocess
import sys
import warnings
from typing import Any

import attrs
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.environment import StepResult, Task
from skyrl_engine.rollout.episode_process import ROLES, task_of, wrong_end, wrong_messages, wrong_numbers
from skyrl_engine.testing.environments.bench import (
    LOOKED_AT,
    MOST_TURNS,
    SPLITS,
    Pair,
    Script,
    Turn,
    answer,
    has_solver,
    pairs,
    plain,
    played,
    reward_of,
    said_in,
    scripts,
    shared_state,
    solution_of,
    some_of,
    stages,
    task_for,
    tasks_of,
    told,
    worth,
)
from skyrl_engine.testing.plugin_promises import PLUGIN_PROMISES
from skyrl_engine.testing.promise import Broken, Promise, Undecidable, promise
from skyrl_engine.testing.random_state import global_random_state, restored_random_state, seed_everything
from skyrl_engine.testing.subject import Subject

FEW = 0.3
"""Effort of promises that play episodes: an environment is made anew in every case."""

PROMPT_BYTES = 4 * 1024
"""A prompt of more bytes is likely longer than 1,024 tokens, the default of `rl.max_prompt_tokens`."""

GARBAGE = (
    Turn("text", ""),
    Turn("text", "\x00\x01\ufffd\u202e"),
    Turn("text", "((((((((["),
    Turn("text", '<tool_call>{"name": "', problem="the call of a tool is not closed", finish="length"),
    Turn("text", "1e400"),
    Turn("text", "\\boxed{" * 50),
    Turn("text", "a" * 2**20, finish="length"),
    Turn("calls"),
)
"""Turns that a model takes sooner or later, and that mean nothing."""


def _random(subject: Subject[Any]) -> str | None:
    return "the environment claims random: it may answer otherwise" if subject.make().claims.random else None


def _no_solver(subject: Subject[Any]) -> str | None:
    return None if has_solver(subject) else "there is no method solve(task), so nobody knows a right answer"


# --- tasks -------------------------------------------------------------------------------------------------------------------------


@promise("Every task is a prompt of plain JSON values: messages, of which the model's is next, or tokens")
def well_formed(subject: Subject[Any], _case: None) -> None:
    environment = subject.make()
    for split in SPLITS:
        try:
            tasks = environment.tasks(split)
            count = len(tasks)
            looked = some_of(tasks)
        except Exception as error:
            raise Broken(f"its tasks cannot be read: {told(error)}", "Correct it, or its options") from error
        if split == "train" and not count:
            raise Broken("has no task to train on", "Check its options")
        for number, task in looked:
            wrong = _wrong_task(task)
            if wrong is not None:
                raise Broken(f"task {number} of {split} {wrong}", "Give every task a key, and messages or tokens, of JSON values")
        _warn_of_long_prompts(split, [len(said_in(task).encode()) for _, task in looked])


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
        return f"({task.key}) is not of JSON values: {told(error)}"
    if plain(again) != plain(task):
        return f"({task.key}) is another one after it went through JSON"
    return None


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
        forth, back = tasks_of(one, split), tasks_of(other, split)
        if len(forth) != len(back):
            raise Broken(
                f"has {len(forth):,} tasks of {split}, and {len(back):,} when it is made again", "Take nothing but options"
            )
        first = {number: plain(task) for number, task in some_of(forth, 40)}
        for number in reversed(first):
            again = {"in another object": back[number], "when it is asked for again": forth[number]}
            again["after pickling"] = pickle.loads(pickle.dumps(again["in another object"]))  # noqa: S301 -- our own
            for when, task in again.items():
                if plain(task) != first[number]:
                    raise Broken(
                        f"task {number} of {split} is {_cut(plain(task))} {when}, and was {_cut(first[number])}",
                        "Draw each task from a seed of its own, such as (seed, number), and not from one stream",
                    )


@promise("Another process has the same tasks, and answers turns in the same way")
def same_in_another_process(subject: Subject[Any], _case: None) -> None:
    environment = subject.make()
    script = Script("train", 0, 7, (Turn("text", "4"), Turn("text", "yes"), Turn("prompt")))
    here = {split: [plain(task) for _, task in some_of(tasks_of(environment, split), 8)] for split in SPLITS}
    answers = [] if environment.claims.random else played(subject.make(), subject.make(), script)
    there = _elsewhere(subject, environment)
    for split in SPLITS:
        for mine, theirs in zip(here[split], there["tasks"][split], strict=True):
            if mine != theirs:
                raise Broken(
                    f"a task of {split} is {_cut(theirs)} in another process, and {_cut(mine)} here",
                    "Let tasks depend on options alone: not on hash(), the time, sets, or the order of a folder",
                )
    if answers and there["answers"] != json.loads(json.dumps(answers)):
        raise Broken(
            f"an episode answers {_cut(there['answers'])} in another process, and {_cut(answers)} here",
            "Let answers depend on task, seed and turns alone: not on hash(), the time or sets",
        )


_PROGRAM = """
import json, os, pickle, sys
from skyrl_engine.testing.environments.promises import told_by
stream = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
print(json.dumps(told_by(pickle.loads(sys.stdin.buffer.read()))), file=stream)
"""


def told_by(setup: tuple[dict[str, Any] | None, Any]) -> dict[str, Any]:
    """Return tasks and answers of an environment, given as the lock of its plugin or itself, in the process that asks for it."""
    from skyrl_engine.config import SelectedPlugin

    lock, environment = setup
    subject: Subject[Any] = (
        Subject("elsewhere", lambda: environment) if lock is None else Subject.of_plugin(SelectedPlugin.from_lock(lock))
    )
    environment = subject.make()
    tasks = {split: [plain(task) for _, task in some_of(tasks_of(environment, split), 8)] for split in SPLITS}
    script = Script("train", 0, 7, (Turn("text", "4"), Turn("text", "yes"), Turn("prompt")))
    return {"tasks": tasks, "answers": [] if environment.claims.random else played(subject, subject.make(), script)}


def _elsewhere(subject: Subject[Any], environment: Any) -> dict[str, Any]:
    try:
        data = pickle.dumps((None, environment) if subject.plugin is None else (subject.plugin.lock(), None))
    except Exception as error:
        raise Undecidable(f"the environment cannot be pickled: {told(error)}") from error
    paths = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(  # noqa: S603 -- this interpreter, with a text of our own
        [sys.executable, "-P", "-c", _PROGRAM],
        input=data,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "1"},
    )
    if ran.returncode:
        last = ran.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        raise Broken(f"cannot be made and played in a fresh process: {last[0]}", "Import what it needs in its own module")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _cut(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:160]}..."


@promise("Keys are unique, and no key or prompt to train on is held out, unless it claims shared_tasks")
def keys(subject: Subject[Any], _case: None) -> None:
    environment = subject.make()
    seen: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        seen[split] = {}
        for number, task in some_of(tasks_of(environment, split), 20 * LOOKED_AT):
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
    prompts = {split: {_prompt(task) for _, task in some_of(tasks_of(environment, split))} for split in SPLITS}
    shared = prompts["train"] & prompts["eval"] if len(prompts["eval"]) > 1 else set()
    # a procedure meets the same question twice now and then; a copy does it all the time
    if 2 * len(shared) > len(prompts["eval"]):
        raise Broken(
            f"{len(shared)} of {len(prompts['eval'])} held-out prompts are prompts to train on",
            "Hold other tasks out, or claim shared_tasks",
        )


def _prompt(task: Task) -> str:
    """Return what makes tasks the same: prompt and data, without numbers that only name the task."""
    data = {name: value for name, value in task.data.items() if name not in ("split", "number", "key", "id")}
    return json.dumps([plain(task)["messages"], list(task.prompt_ids), data], sort_keys=True, default=str)


# --- episodes ----------------------------------------------------------------------------------------------------------------------


def _of_both_splits(subject: Subject[Any]) -> "st.SearchStrategy[Script]":
    split = st.sampled_from(SPLITS)
    return st.tuples(scripts(subject), split).map(lambda drawn: attrs.evolve(drawn[0], split=drawn[1]))


@promise("Every attempt can be played to its end, also at a held-out task: no turn raises", cases=_of_both_splits, effort=FEW)
def answers(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    if case.split == "eval" and not len(tasks_of(environment, "eval")):
        return
    task = task_for(environment, case)
    with stages(subject, environment) as open_stage:
        what = "opened"
        try:
            stage = open_stage(task, case.seed)
            what = "begun"
            stage.begin()
            while not stage.done and stage.turn < min(8, environment.claims.max_turns):
                what = f"answered in turn {stage.turn}"
                stage.say(case.turn(stage.turn))
        except Undecidable:
            raise
        except Exception as error:
            raise Broken(
                f"an attempt at task {task.key!r:.80} of {case.split} cannot be {what}: {told(error)}",
                "Give a reward for every text, such as 0 for what cannot be read, in every task",
            ) from error


@promise(
    "The same task, seed and turns give the same answers, whatever the random state", cases=scripts, exempt=_random, effort=FEW
)
def repeatable(subject: Subject[Any], case: Script) -> None:
    answers = []
    with restored_random_state():
        for seed in range(2):
            seed_everything(seed)
            answers.append(played(subject, subject.make(), case))
        environment = subject.make()
        answers += [played(subject, environment, case) for _ in range(2)]
    _require_same(answers[0], answers[1], "it draws numbers that the seed does not decide")
    _require_same(answers[0], answers[3], "the environment remembers what it was asked before")


def _require_same(one: list[Any], other: list[Any], cause: str) -> None:
    for turn, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            when = "begin" if turn == 0 else f"turn {turn - 1}"
            raise Broken(
                f"{when} is answered with {_cut(theirs)}, and was with {_cut(mine)}: {cause}",
                "Draw from the seed that `open` is given, and keep what an episode needs in the episode",
            )
    if len(one) != len(other):
        raise Broken(f"an episode takes {len(one) - 1} turns, and then {len(other) - 1}: {cause}", "Draw from the seed alone")


@promise("Two episodes side by side are answered as each is alone", cases=pairs, exempt=_random, effort=FEW)
def episodes_apart(subject: Subject[Any], case: Pair) -> None:
    pair = (case.one, case.other)
    alone = [played(subject, subject.make(), script) for script in pair]
    environment = subject.make()
    with stages(subject, environment) as open_stage:
        try:
            both = [open_stage(task_for(environment, script), script.seed) for script in pair]
        except Undecidable:
            raise
        except Exception as error:
            raise Broken(f"a second episode cannot be opened: {told(error)}", "Keep an episode's state in the episode") from error
        answers: list[list[Any]] = [[], []]
        # each in the order drawn, then what is left of the first and of the second
        for which in (*map(int, case.order), *[0] * 10, *[1] * 10):
            stage, script = both[which], pair[which]
            if len(answers[which]) < len(alone[which]):
                try:
                    answers[which].append(answer(stage, None if not answers[which] else script.turn(stage.turn)))
                except Undecidable as wrong:
                    raise Broken(
                        f"beside another episode a turn fails that alone does not: {wrong}",
                        "Keep an episode's state in the episode",
                    ) from wrong
                if stage.done and len(answers[which]) < len(alone[which]):
                    break
    for mine, theirs in zip(alone, answers, strict=True):
        _require_same(mine, theirs, "another episode, open at the same time, is felt")


@promise("Every episode ends within max_turns, whatever is said", cases=scripts, effort=FEW)
def ends(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    most = environment.claims.max_turns
    if most > MOST_TURNS:
        raise Undecidable(f"max_turns is {most:,}, more than are played here")
    results = played(subject, environment, case, turns=most)[1:]
    if not results or not results[-1]["done"]:
        raise Broken(
            f"is not done after {most} turns, its max_turns",
            "Give done=True in the last turn, with the reward that is due by then, or claim more turns",
        )


def _raw(subject: Subject[Any], case: Script) -> tuple[Any, list[tuple[StepResult, int]]]:
    """Return what begin gave and the answers to turns as they are, with the number of tokens of each turn."""
    environment = subject.make()
    task = task_for(environment, case)
    results: list[tuple[StepResult, int]] = []
    with stages(subject, environment) as open_stage:
        try:
            stage = open_stage(task, case.seed)
            first = stage.begin()
            while not stage.done and stage.turn < min(8, environment.claims.max_turns):
                result = stage.say(case.turn(stage.turn))
                assert stage.last is not None, "a turn was taken"
                results.append((result, len(stage.last.token_ids)))
        except Undecidable:
            raise
        except Exception as error:
            raise Undecidable(f"an episode fails: {told(error)}") from error
    return first, results


@promise("A turn is answered with a StepResult whose rewards, parts and metrics are finite numbers", cases=scripts, effort=FEW)
def rewards(subject: Subject[Any], case: Script) -> None:
    for result, tokens in _raw(subject, case)[1]:
        if not isinstance(result, StepResult):
            raise Broken(f"step returns {type(result).__name__}", "Return a StepResult")
        if (wrong := wrong_numbers(result, tokens=tokens)) is not None:
            raise Broken(wrong, "Give a finite number for every text, also for wrong ones")


@promise("An answer is done exactly where no message follows", cases=scripts, effort=FEW)
def done_and_messages(subject: Subject[Any], case: Script) -> None:
    for result, _ in _raw(subject, case)[1]:
        if isinstance(result, StepResult) and (wrong := wrong_end(result)) is not None:
            raise Broken(wrong, "Say something, or say that it is over; a last word belongs into info")


@promise("Messages are texts of the roles user, tool and system, never the assistant's", cases=scripts, effort=FEW)
def roles(subject: Subject[Any], case: Script) -> None:
    first, results = _raw(subject, case)
    for given, method in [
        (first, "begin"),
        *((result.messages, "step") for result, _ in results if isinstance(result, StepResult)),
    ]:
        if (wrong := wrong_messages(given, method)) is not None:
            raise Broken(wrong, "Only the model speaks as the assistant: what it says is what it is trained on")


@promise("An episode can be closed at any moment, and twice", cases=scripts, effort=FEW)
def closes(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    task = task_for(environment, case)
    most = min(8, environment.claims.max_turns)
    with stages(subject, environment) as open_stage:
        for moment, steps in (("before it began", 0), ("after it began", 1), ("after a turn", 2), ("after its end", 2 + most)):
            try:
                stage = open_stage(task, case.seed)
                if steps >= 1:
                    stage.begin()
                while not stage.done and stage.turn < steps - 1 and steps >= 2:
                    stage.say(case.turn(stage.turn))
            except Undecidable:
                raise
            except Exception as error:
                if steps == 0:
                    raise Undecidable(f"an episode cannot be opened: {told(error)}") from error
                # whatever failed: it is closed as well
            for time in ("", " a second time"):
                try:
                    stage.close()
                except Exception as error:
                    raise Broken(
                        f"cannot be closed {moment}{time}: {told(error)}", "Free what is held, if it is still held, and forget it"
                    ) from error


@promise(
    "Garbage is answered, not raised: no text, control characters, a megabyte, an open call of a tool", cases=scripts, effort=0.1
)
def garbage(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    task = task_for(environment, case)
    with stages(subject, environment) as open_stage:
        for turn in GARBAGE:
            try:
                stage = open_stage(task, case.seed)
                stage.begin()
                result = stage.say(turn)
                if not stage.done:
                    stage.say(turn)
            except Exception as error:
                raise Broken(
                    f"raises {told(error)} where the model said {turn} ({len(turn.text):,} characters)",
                    "Give a reward for what cannot be read, such as 0: models write everything",
                    case=case,
                ) from error
            if not isinstance(result, StepResult):
                raise Broken(f"returns {type(result).__name__} where the model said {turn}", "Return a StepResult", case=case)


@promise("A task is the same after an episode as before", cases=scripts, effort=FEW)
def task_unchanged(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    task = task_for(environment, case)
    before = json.dumps(plain(task))
    with stages(subject, environment) as open_stage:
        try:
            stage = open_stage(task, case.seed)
            stage.begin()
            while not stage.done and stage.turn < min(8, environment.claims.max_turns):
                stage.say(case.turn(stage.turn))
        except Undecidable:
            raise
        except Exception as error:
            raise Undecidable(f"an episode fails: {told(error)}") from error
    if json.dumps(plain(task)) != before:
        raise Broken("changes the task, which other attempts are given as well", "Work on a copy, in the episode")


@promise("It leaves the global random states alone", cases=scripts, exempt=_random, effort=FEW)
def random_state(subject: Subject[Any], case: Script) -> None:
    with restored_random_state():
        seed_everything(3)
        before = global_random_state()
        environment = subject.make()
        task_for(environment, case)
        if global_random_state() != before:
            raise Broken("draws from the global random state when it makes tasks", "Draw from random.Random(seed)")
        played(subject, environment, case)
        if global_random_state() != before:
            raise Broken(
                "draws from the global random state in an episode", "Draw from random.Random(seed) of the seed it is given"
            )


@promise(
    "It leaves alone what it shares with others in its process: folder, environment variables, limits, handlers",
    cases=scripts,
    effort=FEW,
)
def process_state(subject: Subject[Any], case: Script) -> None:
    before = shared_state()
    environment = subject.make()
    task = task_for(environment, case)
    with stages(subject, environment) as open_stage:
        try:
            stage = open_stage(task, case.seed)
            stage.begin()
            while not stage.done and stage.turn < min(8, environment.claims.max_turns):
                stage.say(case.turn(stage.turn))
            stage.close()
        except Exception as error:
            raise Undecidable(f"an episode fails: {told(error)}") from error
        after = shared_state()
    for name, value in after.items():
        if value != before[name]:
            raise Broken(
                f"leaves the {name} changed, which attempts beside it share",
                "Change it for a subprocess, put it back, or do without",
            )


# --- what is paid ------------------------------------------------------------------------------------------------------------------


def _saying(case: Script, turn: Turn) -> Script:
    return attrs.evolve(case, turns=(turn,))


@promise("The solution of a task is a success", cases=scripts, exempt=_no_solver, effort=FEW)
def solution(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    task = task_for(environment, case)
    known = solution_of(subject, environment, task)
    if known is None:
        raise Undecidable("the task has no solution")
    reward, success = worth(subject, environment, _saying(case, Turn("solution")))
    if not success:
        raise Broken(
            f"the solution of task {task.key!r:.80}, {' / '.join(known)!r:.120}, has the reward {reward:g}, which is no success "
            f"(pass_threshold is {environment.claims.pass_threshold})",
            "Correct the scoring, the solution or pass_threshold",
        )


@promise(
    "Saying nothing, or what the prompt says, is no success where there is a solution", cases=scripts, exempt=_no_solver, effort=FEW
)
def echo(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    task = task_for(environment, case)
    known = solution_of(subject, environment, task)
    if known is None:
        raise Undecidable("the task has no solution")
    for what, turn, text in (("nothing", Turn("text", ""), ""), ("what the prompt says", Turn("prompt"), said_in(task))):
        if text.strip() in {each.strip() for each in known}:
            continue
        reward, success = worth(subject, environment, _saying(case, turn))
        if success:
            raise Broken(
                f"a model that says {what} has the reward {reward:g} for task {task.key!r:.80}, a success without the solution",
                "Ask for the answer in a form of its own, and for nothing beside it",
            )


@promise("The parts of a reward, where there are any, add up to it", cases=scripts, effort=FEW)
def parts(subject: Subject[Any], case: Script) -> None:
    for result in played(subject, subject.make(), case)[1:]:
        total, due = sum(result["parts"].values()), reward_of(result)
        if result["parts"] and abs(total - due) > 1e-6 * max(1.0, abs(due), *map(abs, result["parts"].values())):
            raise Broken(
                f"the parts {_cut(result['parts'])} add up to {total:g}, and the reward is {due:g}",
                "Give summands with their weights; what is no summand belongs into metrics",
            )


ENVIRONMENT_PROMISES: tuple[Promise[Any, Any], ...] = (
    well_formed,
    same_tasks,
    same_in_another_process,
    keys,
    answers,
    repeatable,
    episodes_apart,
    ends,
    rewards,
    done_and_messages,
    roles,
    closes,
    garbage,
    task_unchanged,
    random_state,
    process_state,
    solution,
    echo,
    parts,
    *PLUGIN_PROMISES,
)
