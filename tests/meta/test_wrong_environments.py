"""Every promise to environments is broken by something, and odd environments that are right are left alone."""

import warnings

import breaking
import odd_environments as odd
import pytest
import wrong_comparisons as comparisons
import wrong_episodes as episodes
import wrong_tasks as tasks
from environment_of_sums import Plain

from skyrl_engine.testing.environments.promises import ENVIRONMENT_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/rollout",
    "tests/meta/breaking.py",
    "tests/meta/environment_of_sums.py",
    "tests/meta/odd_environments.py",
    "tests/meta/wrong_comparisons.py",
    "tests/meta/wrong_episodes.py",
    "tests/meta/wrong_tasks.py",
)

EXAMPLES = 40
SLOW = "same_in_another_process"
"""It starts a process, so it is checked where that is the point."""

QUICK = [promise for promise in ENVIRONMENT_PROMISES if promise.name != SLOW]

FAULTS = [
    (episodes.SharedTurns, {"episodes_apart"}, "another episode, open at the same time, is felt"),
    (episodes.Teaches, {"episodes_apart", "repeatable"}, "the environment remembers what it was asked before"),
    (episodes.RunningMean, {"repeatable", "episodes_apart", "solution"}, "the environment remembers what it was asked before"),
    (episodes.GlobalRandom, {"random_state"}, "draws from the global random state in an episode"),
    (
        episodes.RandomReward,
        {"repeatable", "episodes_apart", "random_state", "echo", "solution"},
        "draws numbers that the seed does not decide",
    ),
    (episodes.OwnNoise, {"repeatable", "episodes_apart"}, "draws numbers that the seed does not decide"),
    (episodes.Endless, {"ends", "solution"}, "is not done after 2 turns"),
    (episodes.TextReward, {"rewards"}, "reward is '1.0', where a finite number up to 3.4e+38 is due"),
    (episodes.NanReward, {"rewards"}, "reward is nan, where a finite number up to 3.4e+38 is due"),
    (episodes.SingleReward, {"rewards"}, "reward is float32, which has lost digits"),
    (episodes.NumberResult, {"rewards", "garbage"}, "step returns float"),
    (episodes.TokenRewards, {"rewards"}, "one per token"),
    (episodes.UnclaimedColumn, {"rewards"}, "which the environment's claims do not name"),
    (episodes.MutatesTask, {"task_unchanged"}, "changes the task, which other attempts are given as well"),
    (episodes.TellsTheAnswer, {"echo"}, "a success without the solution"),
    (episodes.PaysNothing, {"solution"}, "has the reward 0.9, which is no success"),
    (episodes.PaysTheTurnBefore, {"solution"}, "has the reward 0"),
    (episodes.PaysEmpty, {"echo"}, "a model that says nothing has the reward 1"),
    (episodes.SpeaksForTheModel, {"roles"}, "not of the roles user, tool, system"),
    (episodes.ContentOfParts, {"roles"}, "whose content is no text"),
    (tasks.DuplicateKeys, {"keys"}, "tasks 0 and 1 of train both have the key 'train/0'"),
    (tasks.SharesKeys, {"keys"}, "50 keys are among the tasks to train on and among those held out"),
    (tasks.SharesPrompts, {"keys"}, "50 of 50 held-out prompts are prompts to train on"),
    (tasks.HoldsOutWhatIsTrainedOn, {"keys"}, "100 of 100 held-out prompts are prompts to train on"),
    (episodes.ClosesOnce, {"closes"}, "cannot be closed before it began a second time: KeyError"),
    (episodes.ClosesWhatBegan, {"closes"}, "cannot be closed before it began: AttributeError"),
    (episodes.DoneWithMessages, {"done_and_messages"}, "done is true, and messages follow"),
    (episodes.GoesOnSilently, {"done_and_messages"}, "done is false, and no message follows"),
    (episodes.RaisesOnGarbage, {"garbage", "answers"}, "raises ZeroDivisionError"),
    (episodes.NeedsToolCalls, {"garbage"}, "raises AssertionError"),
    (episodes.PartsWithoutWeights, {"parts"}, "add up to 2"),
    (tasks.Stream, {"same_tasks"}, "and not from one stream"),
    (tasks.NoTasks, {"well_formed"}, "has no task to train on"),
    (tasks.BothPrompts, {"well_formed"}, "has both messages and prompt_ids"),
    (tasks.NoJson, {"well_formed"}, "is not of JSON values"),
    (tasks.NumbersAsKeys, {"well_formed"}, "has a table with the key 0, of which JSON makes a text"),
    (tasks.ModelHasSpoken, {"well_formed"}, "ends with a message of the assistant"),
    (tasks.HoldsALambda, {"pickling"}, "cannot be pickled"),
    (episodes.RaisesOnYes, {"answers"}, "cannot be answered in turn"),
    (episodes.HeldOutForNobody, {"solution"}, "has the reward 0, which is no success"),
    (episodes.ReadsAnyNumber, {"garbage"}, "Exceeds the limit"),
    (episodes.SetInInfo, {"rewards"}, "info is {'said'"),
    (episodes.ChangesFolder, {"process_state"}, "leaves the working directory at"),
    (comparisons.LeavesOneOut, {"comparisons"}, "results are due, one per attempt"),
    (comparisons.DividesByTheSpread, {"comparisons"}, "compare raises ZeroDivisionError"),
    (comparisons.PrefersTheFirst, {"attempt_order"}, "in another order of the attempts"),
    (comparisons.RemembersTheLongest, {"comparisons_repeat"}, "remembers what it compared before"),
    (comparisons.OwnNoiseOfComparison, {"comparisons_repeat"}, "draws numbers that nothing decides"),
    (comparisons.GlobalNoiseOfComparison, {"random_state"}, "draws from the global random state in compare"),
    (comparisons.ShufflesItsList, {"attempts_unchanged"}, "changes the attempts, or their list, that it is given"),
]
BY_NIGHT = [
    (episodes.ReadsFloats, {"rewards"}, "reward is nan, where a finite number up to 3.4e+38 is due"),
    (episodes.ReadsJson, {"garbage"}, "raises RecursionError"),
    (episodes.AsksTheSilent, {"ends"}, "is not done after 2 turns"),
    (episodes.RaisesInTheSecondTurn, {"answers"}, "cannot be answered in turn 1"),
    (tasks.OnlyTrains, {"answers"}, "of eval cannot be opened"),
    (tasks.TellsWhatIsHeldOut, {"echo"}, "a success without the solution"),
    (episodes.LeavesAProcess, {"process_state"}, "leaves the process"),
    (episodes.SuccessAsText, {"rewards"}, "success is 'yes', where true, false or none is due"),
    (episodes.SetsVariables, {"process_state"}, "changes the environment variables"),
    (episodes.SetsAnAlarm, {"process_state"}, "changes the handler of SIGALRM"),
    (episodes.SilencesNumPy, {"process_state"}, "leaves the errors of NumPy (divide) at ignore"),
    (episodes.ServesOnAThread, {"process_state"}, "threads running, such as 'server'"),
    (episodes.RaisesTheLimit, {"process_state"}, "leaves the recursion limit at"),
    (episodes.FreesAtTheEnd, {"closes"}, "cannot be closed after its end"),
    (comparisons.ReturnsNumbers, {"comparisons"}, "compare returned float"),
    (comparisons.SetInInfoOfComparison, {"comparisons"}, "info is {'texts'"),
    (comparisons.RanksTies, {"attempt_order"}, "in another order of the attempts"),
    (comparisons.ElectsOne, {"attempt_order"}, "in another order of the attempts"),
    (comparisons.AddsToTheTask, {"attempts_unchanged"}, "changes the task that it is given"),
    (comparisons.ComparesElsewhere, {"process_state"}, "leaves the working directory at"),
]

RIGHT = [
    Plain,
    odd.Asynchronous,
    odd.SeededNoise,
    odd.NoisyJudge,
    odd.NegativeRewards,
    odd.ProcessRewards,
    odd.SetsTheNextTurn,
    odd.TokensAsPrompt,
    odd.OneTask,
    odd.TwoTurnSolutions,
    odd.NobodyKnows,
    odd.WorksElsewhere,
    odd.RewardsAgainstTheMean,
    odd.MeetsTheNext,
    pytest.param(odd.EndsItsProcess, marks=pytest.mark.nightly),
    pytest.param(odd.RemembersTasks, marks=pytest.mark.nightly),
]


def name_class(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("fault", "promises", "words"), FAULTS, ids=name_class)
def test_a_wrong_environment_breaks_its_promise(fault, promises, words):
    """These promises and no others; where an environment cannot be played, the others are undecided."""
    breaking.require_broken(breaking.broken_by(QUICK, fault, promises, examples=EXAMPLES), promises, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "promises", "words"), BY_NIGHT, ids=name_class)
def test_other_wrong_environments_break_their_promises(fault, promises, words):
    held = [promise for promise in QUICK if promise.name in promises]
    breaking.require_broken(breaking.broken_by(held, fault, promises, examples=4 * EXAMPLES), promises, words)


@pytest.mark.parametrize("right", RIGHT, ids=name_class)
def test_an_odd_environment_that_is_right_breaks_none(right):
    lines = [
        (promise.name, finding.lines)
        for promise in QUICK
        if (finding := promise.hold(breaking.Subject("odd", right), examples=20)).status not in ("kept", "not claimed")
    ]
    assert lines == []


@pytest.mark.parametrize("fault", [tasks.HashedTasks, comparisons.ComparesByHash], ids=name_class)
def test_what_another_process_has_otherwise(fault):
    held = [promise for promise in ENVIRONMENT_PROMISES if promise.name == SLOW]
    broken = breaking.broken_by(held, fault, examples=1)
    breaking.require_broken(broken, {SLOW}, "in another process")
    assert breaking.broken_by(held, Plain, examples=1) == {}


@pytest.mark.nightly
def test_tasks_that_another_rank_has_otherwise():
    held = [promise for promise in ENVIRONMENT_PROMISES if promise.name == SLOW]
    broken = breaking.broken_by(held, tasks.TasksOfARank, examples=1)
    breaking.require_broken(broken, {SLOW}, "in another process")


def test_prompts_that_are_longer_than_most_models_are_given_are_told_with_their_size():
    with pytest.warns(
        UserWarning, match=r"50 of 50 tasks of (train|eval) have a prompt of more than 4,096 bytes \(the longest has 10,0"
    ):
        finding = well_formed().hold(breaking.Subject("long", tasks.LongPrompts))
    assert finding.status == "kept"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert well_formed().hold(breaking.Subject("short", Plain)).status == "kept"


def well_formed():
    return next(promise for promise in ENVIRONMENT_PROMISES if promise.name == "well_formed")


def test_a_suite_may_know_solutions_that_the_environment_does_not():
    nothing = breaking.broken_by(QUICK, odd.NobodyKnows, {"solution"}, examples=20, hooks={"solve": lambda _task: "wrong"})
    assert set(nothing) == {"solution"}


def test_every_promise_to_environments_is_broken_by_something():
    elsewhere = {SLOW, "config_round_trip", "light_import"}  # above, and broken by others in this folder
    assert {promise.name for promise in ENVIRONMENT_PROMISES} == {name for _, names, _ in FAULTS for name in names} | elsewhere
