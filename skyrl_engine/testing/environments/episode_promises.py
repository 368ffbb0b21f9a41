"""Promises about the episodes of every environment, as far as its claims go."""

import json
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.environment import StepResult
from skyrl_engine.contracts.values.returned import describe_returned
from skyrl_engine.rollout.episode_process import wrong_columns, wrong_end, wrong_messages, wrong_numbers, wrong_rest
from skyrl_engine.testing.environments.bench import (
    MOST_TURNS,
    SPLITS,
    Pair,
    Script,
    Turn,
    answer,
    format_error,
    has_solver,
    pairs,
    play,
    play_for_reward,
    read_prompt_text,
    reward_of,
    scripts,
    shorten,
    solution_of,
    stages,
    stages_without_restore,
    task_for,
    tasks_of,
    to_plain,
)
from skyrl_engine.testing.environments.compared import TEXTS, compare_group, group_of
from skyrl_engine.testing.process_settings import require_settings_left_alone
from skyrl_engine.testing.promise import Broken, Undecidable, promise
from skyrl_engine.testing.random_state import global_random_state, restore_random_state, seed_everything
from skyrl_engine.testing.subject import Subject

FEW = 0.3
"""Effort of promises that play episodes: every case makes a new environment."""

GARBAGE = (
    Turn("text", ""),
    Turn("text", "\x00\x01\ufffd\u202e"),
    Turn("text", "((((((((["),
    Turn("text", '<tool_call>{"name": "', problem="the call of a tool is not closed", finish="length"),
    Turn("text", "1e400"),
    Turn("text", "9" * 5000),
    Turn("text", "\u00b2"),  # isdigit() holds for it, and int() refuses it
    Turn("text", "1/0"),
    Turn("text", "null"),
    Turn("text", "[" * 2**17),
    Turn("text", "\\boxed{" * 50),
    Turn("text", "a" * 2**20, finish="length"),
    Turn("calls"),
)
"""Turns that a model takes sooner or later, and that mean nothing."""


NO_NUMBERS = ("nan", "-inf", "1e400", "")
"""Texts that float() reads as what no reward may be, and none."""


def _say_no_numbers(_subject: Subject[Any]) -> list[Script]:
    return [Script("train", 0, 0, (Turn("text", text),)) for text in NO_NUMBERS]


def _exempt_random(subject: Subject[Any]) -> str | None:
    return "the environment claims random: it may answer otherwise" if subject.make().claims.random else None


def _no_solver(subject: Subject[Any]) -> str | None:
    return None if has_solver(subject) else "there is no method solve(task), so nobody knows a right answer"


# --- episodes ----------------------------------------------------------------------------------------------------------------------


def _draw_both_splits(subject: Subject[Any]) -> "st.SearchStrategy[Script]":
    split = st.sampled_from(SPLITS)
    return st.tuples(scripts(subject), split).map(lambda drawn: attrs.evolve(drawn[0], split=drawn[1]))


def _has_nothing_held_out(environment: Any, case: Script) -> bool:
    """Return True for a script about held-out tasks where there are none."""
    return case.split == "eval" and not len(tasks_of(environment, "eval"))


@promise("Every attempt can be played to its end, also at a held-out task: no turn raises", cases=_draw_both_splits, effort=FEW)
def answers(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    if _has_nothing_held_out(environment, case):
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
                f"an attempt at task {task.key!r:.80} of {case.split} cannot be {what}: {format_error(error)}",
                "Give a reward for every text, such as 0 for what cannot be read, in every task",
            ) from error


@promise(
    "The same task, seed and turns give the same answers, whatever the random state",
    cases=scripts,
    exempt=_exempt_random,
    effort=FEW,
)
def repeatable(subject: Subject[Any], case: Script) -> None:
    answers = []
    with restore_random_state():
        for seed in range(2):
            seed_everything(seed)
            answers.append(play(subject, subject.make(), case))
        environment = subject.make()
        answers.append(play(subject, environment, case))
        for other in _others(case):
            with suppress(Undecidable):
                play(subject, environment, other)
        answers.append(play(subject, environment, case))
    _require_same(answers[0], answers[1], "it draws numbers that the seed does not decide")
    _require_same(answers[2], answers[3], "the environment remembers what it was asked before")


def _others(case: Script) -> list[Script]:
    """Return attempts at other tasks, good ones and bad ones, which move a mean of rewards."""
    turns = Turn("solution"), Turn("text", "x" * 40), Turn("text", "4"), Turn("solution")
    return [Script(case.split, case.number + place, case.seed ^ place, (turn,)) for place, turn in enumerate(turns, start=1)]


def _require_same(one: list[Any], other: list[Any], cause: str) -> None:
    for turn, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            when = "begin" if turn == 0 else f"turn {turn - 1}"
            raise Broken(
                f"{when} is answered with {shorten(theirs)}, and was with {shorten(mine)}: {cause}",
                "Draw from the seed that `open` is given, and keep what an episode needs in the episode",
            )
    if len(one) != len(other):
        raise Broken(f"an episode takes {len(one) - 1} turns, and then {len(other) - 1}: {cause}", "Draw from the seed alone")


@promise("Two episodes side by side are answered as each is alone", cases=pairs, exempt=_exempt_random, effort=FEW)
def episodes_apart(subject: Subject[Any], case: Pair) -> None:
    pair = (case.one, case.other)
    alone = [play(subject, subject.make(), script) for script in pair]
    environment = subject.make()
    with stages(subject, environment) as open_stage:
        try:
            both = [open_stage(task_for(environment, script), script.seed) for script in pair]
        except Undecidable:
            raise
        except Exception as error:
            raise Broken(
                f"a second episode cannot be opened: {format_error(error)}", "Keep an episode's state in the episode"
            ) from error
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


@promise("Every episode ends within max_turns, whatever is said", cases=scripts, effort=FEW, first=_say_no_numbers)
def ends(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    most = environment.claims.max_turns
    if most > MOST_TURNS:
        raise Undecidable(f"max_turns is {most:,}, more than are played here")
    results = play(subject, environment, case, turns=most)[1:]
    if not results or not results[-1]["done"]:
        raise Broken(
            f"is not done after {most} turns, its max_turns",
            "Give done=True in the last turn, with the reward that is due by then, or claim more turns",
        )


def _play_raw(subject: Subject[Any], case: Script) -> tuple[Any, list[tuple[StepResult, int]]]:
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
            raise Undecidable(f"an episode fails: {format_error(error)}") from error
    return first, results


@promise(
    "A turn is answered with a StepResult: rewards, parts and metrics are finite numbers, info is JSON, success and sampling are valid",
    cases=scripts,
    effort=FEW,
    first=_say_no_numbers,
)
def rewards(subject: Subject[Any], case: Script) -> None:
    for result, tokens in _play_raw(subject, case)[1]:
        if not isinstance(result, StepResult):
            raise Broken(f"step returns {describe_returned(result)}", "Return a StepResult")
        reward: Any = result.reward
        if isinstance(reward, np.floating) and reward.dtype != np.float64:
            raise Broken(
                f"reward is {describe_returned(reward).removesuffix('[]')}, which has lost digits of a float64",
                "Compute rewards in float64: float(numpy_array.mean(dtype=np.float64))",
            )
        if (wrong := wrong_numbers(result, tokens=tokens)) is not None:
            raise Broken(wrong, "Give a finite number for every text, also for wrong ones")
        if (wrong := wrong_columns(result, tokens=tokens, claimed=subject.make().claims.columns)) is not None:
            raise Broken(wrong, "Give in every answer one number per token for each column that the claims name, and no other")
        if (wrong := wrong_rest(result)) is not None:
            raise Broken(wrong, "Give success as true, false or none, and mappings of plain values")
        try:
            to_plain(result)
        except Undecidable as error:
            raise Broken(f"info is {result.info!r:.120}: {error}", "Keep texts, numbers, lists and mappings in info") from error


@promise("An answer is done exactly where no message follows", cases=scripts, effort=FEW)
def done_and_messages(subject: Subject[Any], case: Script) -> None:
    for result, _ in _play_raw(subject, case)[1]:
        if isinstance(result, StepResult) and (wrong := wrong_end(result)) is not None:
            raise Broken(wrong, "Say something, or say that it is over; a last word belongs into info")


@promise("Messages are texts of the roles user, tool and system, never the assistant's", cases=scripts, effort=FEW)
def roles(subject: Subject[Any], case: Script) -> None:
    first, results = _play_raw(subject, case)
    for messages, method in [
        (first, "begin"),
        *((result.messages, "step") for result, _ in results if isinstance(result, StepResult)),
    ]:
        if (wrong := wrong_messages(messages, method)) is not None:
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
                    raise Undecidable(f"an episode cannot be opened: {format_error(error)}") from error
                # whatever failed: it is closed as well
            for time in ("", " a second time"):
                try:
                    stage.close()
                except Exception as error:
                    raise Broken(
                        f"cannot be closed {moment}{time}: {format_error(error)}",
                        "Free what is held, if it is still held, and forget it",
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
                    f"raises {format_error(error)} where the model said {turn} ({len(turn.text):,} characters)",
                    "Give a reward for what cannot be read, such as 0: models write everything",
                    case=case,
                ) from error
            if not isinstance(result, StepResult):
                raise Broken(
                    f"step returns {describe_returned(result)} where the model said {turn}", "Return a StepResult", case=case
                )


@promise("A task is the same after an episode as before", cases=scripts, effort=FEW)
def task_unchanged(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    task = task_for(environment, case)
    before = json.dumps(to_plain(task))
    with stages(subject, environment) as open_stage:
        try:
            stage = open_stage(task, case.seed)
            stage.begin()
            while not stage.done and stage.turn < min(8, environment.claims.max_turns):
                stage.say(case.turn(stage.turn))
        except Undecidable:
            raise
        except Exception as error:
            raise Undecidable(f"an episode fails: {format_error(error)}") from error
    if json.dumps(to_plain(task)) != before:
        raise Broken("changes the task, which other attempts are given as well", "Work on a copy, in the episode")


@promise("It leaves the global random states alone", cases=scripts, exempt=_exempt_random, effort=FEW)
def random_state(subject: Subject[Any], case: Script) -> None:
    with restore_random_state():
        seed_everything(3)
        before = global_random_state()
        environment = subject.make()
        task_for(environment, case)
        if global_random_state() != before:
            raise Broken("draws from the global random state when it makes tasks", "Draw from random.Random(seed)")
        play(subject, environment, case)
        if global_random_state() != before:
            raise Broken(
                "draws from the global random state in an episode", "Draw from random.Random(seed) of the seed it is given"
            )
        if environment.claims.compares:
            compare_group(subject, environment, group_of(TEXTS))
            if global_random_state() != before:
                raise Broken(
                    "draws from the global random state in compare", "Compare without chance, or draw from random.Random(0)"
                )


@promise(
    "It leaves alone what it shares with others in its process: folder, environment variables, limits, handlers, settings of libraries",
    cases=scripts,
    effort=FEW,
    shrinks=False,
)
def process_state(subject: Subject[Any], case: Script) -> None:
    def attempt() -> None:
        environment = subject.make()
        task = task_for(environment, case)
        with stages_without_restore(subject, environment) as open_stage:
            try:
                stage = open_stage(task, case.seed)
                stage.begin()
                while not stage.done and stage.turn < min(8, environment.claims.max_turns):
                    stage.say(case.turn(stage.turn))
                stage.close()
            except Exception as error:
                raise Undecidable(f"an episode fails: {format_error(error)}") from error
            if environment.claims.compares:
                compare_group(subject, environment, group_of(TEXTS))

    try:
        require_settings_left_alone(attempt)
    except Broken as broken:
        raise Broken(
            f"{broken.cause}, and attempts beside it share that", "Change it for a subprocess, put it back, or do without"
        ) from broken


# --- what is paid ------------------------------------------------------------------------------------------------------------------


def _replace_turns(case: Script, turn: Turn) -> Script:
    return attrs.evolve(case, turns=(turn,))


@promise("The solution of a task is a success, held out or not", cases=_draw_both_splits, exempt=_no_solver, effort=FEW)
def solution(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    if _has_nothing_held_out(environment, case):
        return
    task = task_for(environment, case)
    known = solution_of(subject, environment, task)
    if known is None:
        raise Undecidable("the task has no solution")
    reward, success = play_for_reward(subject, environment, _replace_turns(case, Turn("solution")))
    if not success:
        raise Broken(
            f"the solution of task {task.key!r:.80}, {' / '.join(known)!r:.120}, has the reward {reward:g}, which is no success "
            f"(pass_threshold is {environment.claims.pass_threshold})",
            "Correct the scoring, the solution or pass_threshold",
        )


@promise(
    "Saying nothing, or what the prompt says, is no success where there is a solution",
    cases=_draw_both_splits,
    exempt=_no_solver,
    effort=FEW,
)
def echo(subject: Subject[Any], case: Script) -> None:
    environment = subject.make()
    if _has_nothing_held_out(environment, case):
        return
    task = task_for(environment, case)
    known = solution_of(subject, environment, task)
    if known is None:
        raise Undecidable("the task has no solution")
    for what, turn, text in (("nothing", Turn("text", ""), ""), ("what the prompt says", Turn("prompt"), read_prompt_text(task))):
        if text.strip() in {solution_turn.strip() for solution_turn in known}:
            continue
        reward, success = play_for_reward(subject, environment, _replace_turns(case, turn))
        if success:
            raise Broken(
                f"a model that says {what} has the reward {reward:g} for task {task.key!r:.80}, a success without the solution",
                "Ask for the answer in a form of its own, and for nothing beside it",
            )


@promise("The parts of a reward, where there are any, add up to it", cases=scripts, effort=FEW)
def parts(subject: Subject[Any], case: Script) -> None:
    for result in play(subject, subject.make(), case)[1:]:
        total, reward = sum(result["parts"].values()), reward_of(result)
        if result["parts"] and abs(total - reward) > 1e-6 * max(1.0, abs(reward), *map(abs, result["parts"].values())):
            raise Broken(
                f"the parts {shorten(result['parts'])} add up to {total:g}, and the reward is {reward:g}",
                "Give summands with their weights; what is no summand belongs into metrics",
            )
