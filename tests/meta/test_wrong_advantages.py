"""Every promise to estimators of advantages is broken by something."""

from functools import partial

import breaking
import numpy as np
import pytest
import wrong_advantages as wrong

from skyrl_engine.testing.advantages.promises import ADVANTAGE_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/rollout",
    "tests/meta/breaking.py",
    "tests/meta/wrong_advantages.py",
)
broken_by = partial(breaking.broken_by, ADVANTAGE_PROMISES, examples=40)

FAULTS = [
    (wrong.RoundedMean, {"equal_rewards"}, "a rounded mean is not the reward itself"),
    (wrong.SumsWithoutTies, {"equal_rewards"}, "sums of turns differ in their last bits"),
    (wrong.SumsInSingle, {"equal_rewards", "shift"}, "lost its digits"),
    (wrong.FailedMembersCount, {"failures", "zero_sum"}, "the failed trajectory is in a mean"),
    (wrong.NanForOne, {"finite_values"}, "nan among its advantages"),
    (wrong.WrongSign, {"monotone"}, "and the lower reward"),
    (wrong.GroupsByPlace, {"sample_order"}, "it takes neighbours for members of one group"),
    (wrong.MeanOverSamples, {"turns"}, "it counts samples, not trajectories"),
    (wrong.MeanOfTheBatch, {"groups_apart", "zero_sum"}, "it counts over the batch"),
    (wrong.SaysThatItIgnoresGroups, {"trajectories_apart"}, "a run with groups of one is not refused"),
    (wrong.WhitensZeros, {"observations"}, "it counts tokens that the model did not sample"),
    (wrong.CountsObservations, {"observations"}, "it counts tokens that the model did not sample"),
    (wrong.AdvantagesForObservations, {"finite_values"}, "which is not scored"),
    (wrong.HalvedBySize, {"scale"}, "it claims scale = 'linear'"),
    (wrong.ReadsUndeclared, {"needs"}, "it reads what it does not declare"),
    (wrong.TakesIdsForPlaces, {"labels"}, "fails where ids are other numbers"),
    (wrong.FirstIsTheBaseline, {"labels"}, "which id is smaller"),
    (wrong.TimesTheLossWeight, {"loss_weights"}, "they count twice"),
    (wrong.MinusTheOthers, {"zero_sum"}, "add up to"),
    (wrong.WeighsTheMean, {"shift", "zero_sum"}, "when every reward is 8 more"),
    (wrong.VarianceBySquares, {"shift"}, "when every reward is 1,073,741,824 more"),
    (wrong.SubtractsInPlace, {"inputs_unchanged"}, "changes batch.rewards in place"),
    (wrong.Draws, {"repeatable"}, "draws from the global random state"),
    (wrong.Tires, {"repeatable"}, "it keeps something"),
    (wrong.InHalves, {"scale"}, "it claims scale = 'linear'"),
    (wrong.TiresLate, {"repeatable"}, "it keeps something"),
    (wrong.CutsAtAQuantile, {"groups_apart", "zero_sum"}, "it counts over the batch"),
    (wrong.LosesUnscoredRewards, {"rewards_anywhere"}, "rewards of tokens that are not scored are lost"),
    (wrong.NoReturns, {"finite_values"}, "claims returns and gave none"),
    (wrong.OnePerTrajectory, {"finite_values"}, "one value per action token"),
    (wrong.HoldsALambda, {"pickling"}, "cannot be pickled"),
]
IN_EXPLICIT_CASES = [
    (wrong.IdsAsFloats, {"groups_apart", "zero_sum"}, "it counts over the batch"),
    (wrong.IdsIn32Bits, {"groups_apart", "zero_sum"}, "it counts over the batch"),
    (wrong.TableOfIds, {"finite_values"}, "Unable to allocate"),
    (wrong.RefusesManySamples, {"finite_values"}, "too many samples"),
    (wrong.TablesOfEight, {"zero_sum"}, "add up to"),
    (wrong.MembersInAWord, {"zero_sum"}, "add up to"),
    (wrong.MembersInHalfAWord, {"zero_sum"}, "add up to"),
    (wrong.SumsInHalves, {"finite_values"}, "inf among its advantages"),
    (wrong.LastFourTurns, {"turns"}, "it counts samples, not trajectories"),
]
"""Faults that no drawn case shows: more members, turns and larger ids than those have."""

BY_NIGHT = [
    pytest.param(*each, marks=pytest.mark.nightly)
    for each in (
        (wrong.FirstGroupCountsDouble, {"labels"}, "which id is smaller"),
        (wrong.BreaksTiesById, {"labels"}, "which id is smaller"),
        (wrong.ReturnsAsStored, {"sample_order"}, "the return of scored token"),
        (wrong.RunsInSingle, {"trajectories_apart"}, "lost the digits of small rewards"),
        (wrong.SaysOutcome, {"turns"}, "it claims outcome"),
        (wrong.ReturnsOfFailed, {"failures"}, "the return of scored token"),
    )
]


@pytest.mark.parametrize(
    ("fault", "promises", "words"), [*FAULTS, *IN_EXPLICIT_CASES, *BY_NIGHT], ids=lambda value: getattr(value, "__name__", None)
)
def test_a_wrong_estimator_breaks_its_promise(fault, promises, words):
    held = [promise for promise in ADVANTAGE_PROMISES if promise.name in promises]
    breaking.require_broken(breaking.broken_by(held, fault, promises, examples=40), promises, words)


@pytest.mark.parametrize("right", [wrong.Plain, wrong.WeighsByTokens, wrong.RunsInDouble])
def test_what_is_right_breaks_nothing(right):
    assert broken_by(right) == {}


def test_an_oracle_holds_an_estimator_to_its_formula():
    """A standard deviation with G instead of G - 1, say: every other promise is kept."""

    def halve(batch):
        return wrong.Plain()(batch) * np.sqrt(0.5)

    assert set(broken_by(wrong.Plain, {"oracle"}, hooks={"oracle": halve})) == {"oracle"}


def test_every_promise_to_estimators_is_broken_by_something():
    # above, and broken by others in this folder
    elsewhere = {"oracle", "config_round_trip", "light_import", "process_settings", "another_rank", "another_process"}
    assert {promise.name for promise in ADVANTAGE_PROMISES} == {name for _, names, _ in FAULTS for name in names} | elsewhere
