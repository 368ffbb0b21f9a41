"""Every promise to group filters is broken by something."""

from functools import partial

import breaking
import pytest
import wrong_group_filters as wrong

from skyrl_engine.testing.group_filters.promises import GROUP_FILTER_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/rollout",
    "tests/meta/breaking.py",
    "tests/meta/wrong_group_filters.py",
)
broken_by = partial(breaking.broken_by, GROUP_FILTER_PROMISES, examples=60)

FAULTS = [
    (wrong.AnswersYes, {"answer"}, "answered"),
    (wrong.EmptyReason, {"answer"}, "answered ''"),
    (wrong.ReasonOfTheEngine, {"answer"}, "that of failed attempts"),
    (wrong.NeedsTwo, {"answer"}, "Degrees of freedom"),
    (wrong.ReadsTokens, {"answer"}, "no attribute 'token_ids'"),
    (wrong.LooksAtTheFirst, {"member_order"}, "in another order of attempts"),
    (wrong.ComparesNeighbours, {"member_order"}, "in another order of attempts"),
    (wrong.DropsRepeats, {"no_memory", "repeatable"}, "it keeps something"),
    (wrong.LimitsDrops, {"no_memory", "repeatable"}, "it keeps something"),
    (wrong.DropsAtRandom, {"repeatable"}, "draws from the global random state"),
    (wrong.DrawsFromNumpy, {"repeatable"}, "draws from the global random state"),
    (wrong.NumberInTheReason, {"few_reasons"}, "Leave numbers and names of the group out"),
    (wrong.RoundedMeanInTheReason, {"few_reasons"}, "Leave numbers and names of the group out"),
    (wrong.RoundsTheMean, {"member_order"}, "add up with math.fsum"),
    (wrong.DeviationOfNothing, {"rounding"}, "a rounded number decides"),
    (wrong.VarianceInHalves, {"rounding"}, "a rounded number decides"),
    (wrong.RangeInSingle, {"rounding"}, "a rounded number decides"),
    (wrong.SortsInPlace, {"inputs_unchanged"}, "changes group.rewards in place"),
    (wrong.ForgetsTheGroup, {"inputs_unchanged"}, "changes group.truncated in place"),
    (wrong.HoldsALambda, {"pickling"}, "cannot be pickled"),
    (wrong.KnowsEight, {"answer"}, "IndexError"),
    (wrong.KnowsTwoEnvironments, {"answer"}, "KeyError"),
    (wrong.KnowsFourAges, {"answer"}, "IndexError"),
    (wrong.RefusesThirtyTwo, {"answer"}, "no room for 32"),
]
BY_NIGHT = [
    (wrong.LooksAtEight, {"member_order"}, "in another order of attempts"),
    (wrong.SizeInTheReason, {"few_reasons"}, "Leave numbers and names of the group out"),
    (wrong.NamesTheEnvironment, {"few_reasons"}, "Leave numbers and names of the group out"),
    (wrong.NamesTheStaleness, {"few_reasons"}, "Leave numbers and names of the group out"),
    (wrong.TakesALogarithm, {"answer"}, "ValueError"),
    (wrong.DropsEveryFortieth, {"repeatable"}, "it keeps something"),
    (wrong.CutsLongAttempts, {"inputs_unchanged"}, "changes group.rewards in place"),
]
ODD = [wrong.ByQuantiles, wrong.GivesEightReasons, pytest.param(wrong.ByEnvironment, marks=pytest.mark.nightly)]


@pytest.mark.parametrize(("fault", "promises", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_filter_breaks_its_promise(fault, promises, words):
    held = [promise for promise in GROUP_FILTER_PROMISES if promise.name in promises]
    breaking.require_broken(breaking.broken_by(held, fault, promises, examples=60), promises, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "promises", "words"), BY_NIGHT, ids=lambda value: getattr(value, "__name__", None))
def test_other_wrong_filters_break_their_promises(fault, promises, words):
    held = [promise for promise in GROUP_FILTER_PROMISES if promise.name in promises]
    breaking.require_broken(breaking.broken_by(held, fault, promises, examples=200), promises, words)


@pytest.mark.parametrize("right", ODD, ids=lambda value: value.__name__)
def test_an_odd_filter_that_is_right_breaks_none(right):
    assert broken_by(right) == {}


@pytest.mark.parametrize("fault", [wrong.LooksAtTheFirst, wrong.NumberInTheReason, wrong.SortsInPlace, wrong.DrawsFromNumpy])
def test_and_no_other(fault):
    expected = next(promises for candidate, promises, _ in FAULTS if candidate is fault)
    assert set(broken_by(fault, expected)) == expected


def test_what_the_faults_are_made_of_is_right():
    assert broken_by(wrong.Plain) == {}


def test_an_oracle_holds_a_filter_to_its_definition():
    assert set(broken_by(wrong.Plain, {"oracle"}, hooks={"oracle": lambda _group: None})) == {"oracle"}


def test_every_promise_to_filters_is_broken_by_something():
    # above, and broken by others in this folder
    elsewhere = {"oracle", "config_round_trip", "light_import", "process_settings", "another_rank", "another_process"}
    assert {promise.name for promise in GROUP_FILTER_PROMISES} == {name for _, names, _ in FAULTS for name in names} | elsewhere
