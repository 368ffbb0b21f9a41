"""Every promise to environments is broken by something, and odd environments that are right are left alone."""

import warnings

import breaking
import pytest
import wrong_environments as wrong

from skyrl_engine.testing.environments.promises import ENVIRONMENT_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/rollout",
    "tests/meta/breaking.py",
    "tests/meta/wrong_environments.py",
)

EXAMPLES = 40
SLOW = "same_in_another_process"
"""It starts a process, so it is checked where that is the point."""

QUICK = [each for each in ENVIRONMENT_PROMISES if each.name != SLOW]

FAULTS = [
    (wrong.SharedTurns, {"episodes_apart"}, "another episode, open at the same time, is felt"),
    (wrong.Teaches, {"episodes_apart", "repeatable"}, "the environment remembers what it was asked before"),
    (wrong.GlobalRandom, {"random_state"}, "draws from the global random state in an episode"),
    (
        wrong.RandomReward,
        {"repeatable", "episodes_apart", "random_state", "echo", "solution"},
        "draws numbers that the seed does not decide",
    ),
    (wrong.OwnNoise, {"repeatable", "episodes_apart"}, "draws numbers that the seed does not decide"),
    (wrong.Endless, {"ends", "solution"}, "is not done after 2 turns"),
    (wrong.TextReward, {"rewards"}, "reward is '1.0', where a finite number is due"),
    (wrong.NanReward, {"rewards"}, "reward is nan, where a finite number is due"),
    (wrong.NumberResult, {"rewards", "garbage"}, "step returns float"),
    (wrong.TokenRewards, {"rewards"}, "one per token"),
    (wrong.MutatesTask, {"task_unchanged"}, "changes the task, which other attempts are given as well"),
    (wrong.TellsTheAnswer, {"echo"}, "a success without the solution"),
    (wrong.PaysNothing, {"solution"}, "has the reward 0.9, which is no success"),
    (wrong.PaysTheTurnBefore, {"solution"}, "has the reward 0"),
    (wrong.PaysEmpty, {"echo"}, "a model that says nothing has the reward 1"),
    (wrong.SpeaksForTheModel, {"roles"}, "not of the roles user, tool, system"),
    (wrong.ContentOfParts, {"roles"}, "whose content is no text"),
    (wrong.DuplicateKeys, {"keys"}, "tasks 0 and 1 of train both have the key 'train/0'"),
    (wrong.SharesKeys, {"keys"}, "50 keys are among the tasks to train on and among those held out"),
    (wrong.SharesPrompts, {"keys"}, "50 of 50 held-out prompts are prompts to train on"),
    (wrong.ClosesOnce, {"closes"}, "cannot be closed before it began a second time: KeyError"),
    (wrong.ClosesWhatBegan, {"closes"}, "cannot be closed before it began: AttributeError"),
    (wrong.DoneWithMessages, {"done_and_messages"}, "done is true, and messages follow"),
    (wrong.GoesOnSilently, {"done_and_messages"}, "done is false, and no message follows"),
    (wrong.RaisesOnGarbage, {"garbage", "answers"}, "raises ZeroDivisionError"),
    (wrong.NeedsToolCalls, {"garbage"}, "raises AssertionError"),
    (wrong.PartsWithoutWeights, {"parts"}, "add up to 2"),
    (wrong.Stream, {"same_tasks"}, "and not from one stream"),
    (wrong.NoTasks, {"well_formed"}, "has no task to train on"),
    (wrong.BothPrompts, {"well_formed"}, "has both messages and prompt_ids"),
    (wrong.NoJson, {"well_formed"}, "is not of JSON values"),
    (wrong.ModelHasSpoken, {"well_formed"}, "ends with a message of the assistant"),
    (wrong.HoldsALambda, {"pickling"}, "cannot be pickled"),
    (wrong.RaisesOnYes, {"answers"}, "cannot be answered in turn"),
    (wrong.ChangesFolder, {"process_state"}, "leaves the working directory at"),
]
BY_NIGHT = [
    (wrong.RaisesInTheSecondTurn, {"answers"}, "cannot be answered in turn 1"),
    (wrong.OnlyTrains, {"answers"}, "of eval cannot be opened"),
    (wrong.SetsVariables, {"process_state"}, "changes the environment variables"),
    (wrong.SetsAnAlarm, {"process_state"}, "changes the handler of SIGALRM"),
    (wrong.SilencesNumPy, {"process_state"}, "leaves the errors of NumPy (divide) at ignore"),
    (wrong.ServesOnAThread, {"process_state"}, "threads running, such as 'server'"),
    (wrong.RaisesTheLimit, {"process_state"}, "leaves the recursion limit at"),
    (wrong.FreesAtTheEnd, {"closes"}, "cannot be closed after its end"),
]

RIGHT = [
    wrong.Plain,
    wrong.Asynchronous,
    wrong.SeededNoise,
    wrong.NoisyJudge,
    wrong.NegativeRewards,
    wrong.ProcessRewards,
    wrong.SetsTheNextTurn,
    wrong.TokensAsPrompt,
    wrong.OneTask,
    wrong.TwoTurnSolutions,
    wrong.NobodyKnows,
    wrong.WorksElsewhere,
    pytest.param(wrong.RemembersTasks, marks=pytest.mark.nightly),
]


def named(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("fault", "promises", "words"), FAULTS, ids=named)
def test_a_wrong_environment_breaks_its_promise(fault, promises, words):
    """These promises and no others; where an environment cannot be played, the others are undecided."""
    breaking.require_broken(breaking.broken_by(QUICK, fault, promises, examples=EXAMPLES), promises, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "promises", "words"), BY_NIGHT, ids=named)
def test_other_wrong_environments_break_their_promises(fault, promises, words):
    held = [each for each in QUICK if each.name in promises]
    breaking.require_broken(breaking.broken_by(held, fault, promises, examples=4 * EXAMPLES), promises, words)


@pytest.mark.parametrize("right", RIGHT, ids=named)
def test_an_odd_environment_that_is_right_breaks_none(right):
    told = [
        (each.name, finding.lines)
        for each in QUICK
        if (finding := each.hold(breaking.Subject("odd", right), examples=20)).status not in ("kept", "not claimed")
    ]
    assert told == []


def test_tasks_that_another_process_has_otherwise():
    held = [each for each in ENVIRONMENT_PROMISES if each.name == SLOW]
    broken = breaking.broken_by(held, wrong.HashedTasks, examples=1)
    breaking.require_broken(broken, {SLOW}, "in another process")
    assert breaking.broken_by(held, wrong.Plain, examples=1) == {}


@pytest.mark.nightly
def test_tasks_that_another_rank_has_otherwise():
    held = [each for each in ENVIRONMENT_PROMISES if each.name == SLOW]
    broken = breaking.broken_by(held, wrong.TasksOfARank, examples=1)
    breaking.require_broken(broken, {SLOW}, "in another process")


def test_prompts_that_are_longer_than_most_models_are_given_are_told_with_their_size():
    with pytest.warns(
        UserWarning, match=r"50 of 50 tasks of (train|eval) have a prompt of more than 4,096 bytes \(the longest has 10,0"
    ):
        finding = well_formed().hold(breaking.Subject("long", wrong.LongPrompts))
    assert finding.status == "kept"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert well_formed().hold(breaking.Subject("short", wrong.Plain)).status == "kept"


def well_formed():
    return next(each for each in ENVIRONMENT_PROMISES if each.name == "well_formed")


def test_a_suite_may_know_solutions_that_the_environment_does_not():
    nothing = breaking.broken_by(QUICK, wrong.NobodyKnows, {"solution"}, examples=20, hooks={"solve": lambda _task: "wrong"})
    assert set(nothing) == {"solution"}


def test_every_promise_to_environments_is_broken_by_something():
    elsewhere = {SLOW, "config_round_trip", "light_import"}  # above, and broken by others in this folder
    assert {each.name for each in ENVIRONMENT_PROMISES} == {name for _, names, _ in FAULTS for name in names} | elsewhere
