"""Every promise to mergers is broken by something."""

from functools import partial

import breaking
import pytest
import wrong_mergers as wrong

from skyrl_engine.testing.mergers.promises import MERGER_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/workers",
    "tests/meta/breaking.py",
    "tests/meta/wrong_mergers.py",
)

broken_by = partial(breaking.broken_by, MERGER_PROMISES, examples=60)

ERRORS = {"missing_samples", "duplicated_samples", "unexpected_samples"}
VALID = {each.name for each in MERGER_PROMISES} - ERRORS

DAILY = [
    (wrong.DropsRanksAboveZero, {"every_rank", "metrics", *ERRORS}, "is missing where 2 data-parallel ranks return their own"),
    (
        wrong.DropsTheLastSample,
        {"one_rank", *ERRORS},
        "sample 1 is missing",
    ),
    (wrong.KeepsTheFirstMiniBatch, {"every_mini_batch", "metrics", *ERRORS}, "is missing where 2 mini-batches come in one call"),
    (wrong.KeepsTensorReplicas, {"replicas", "metrics", *ERRORS}, "sample 1 comes back twice under tp 2"),
    (wrong.KeepsPadding, {"padding", *ERRORS}, "padding was never planned where ranks fill up"),
    (wrong.OrderOfArrival, {"order", "arrival"}, "belongs"),
    (wrong.OrderOfRanks, {"order"}, "belongs"),
    (wrong.ForgetsTheValues, {"values"}, "where the ranks returned"),
    (wrong.Doubles, {"answers"}, "returned float64"),
    (wrong.MeanOfMeans, {"metrics"}, "is a mean over 1, where ranks have 2"),
    (wrong.LargestFromZero, {"metrics"}, "the metric 'a_max' is 0"),
    (wrong.SumsByName, {"metrics"}, "its parts do not combine by max"),
    (wrong.CountsReplicas, {"metrics"}, "the metric 'a_sum' is 2 where its sum is 1"),
    (wrong.MetricsAsTheyArrive, {"arrival"}, "where ranks answer in another order"),
    (wrong.SilentWhereOneIsMissing, {"missing_samples"}, "says nothing where sample 1 is missing"),
    (wrong.SilentWhereOneIsDoubled, {"duplicated_samples"}, "says nothing where sample 1 comes twice"),
    (wrong.SilentWhereOneIsUnexpected, {"unexpected_samples"}, "says nothing where sample 1000"),
    (wrong.CountsSamples, {"missing_samples"}, "is missing and sample"),
    (wrong.WritesInPlace, {"inputs_unchanged"}, "changes the output of rank 0 in place"),
    (wrong.HoldsALambda, {"pickling"}, "cannot be pickled"),
    (wrong.RefusesTwoRanks, {"answers"}, "refuses the outputs of dp 2"),
    (wrong.TakesTurnsWithBuffers, {"answers", "own_memory"}, "Return memory of its own from every call"),
]
NIGHTLY = [
    (wrong.RoomForThirty, {"answers"}, "ValueError"),
    (wrong.RoomForAWord, {"answers"}, "ValueError"),
    (wrong.RefusesEmptyRanks, {"answers"}, "a rank returns no sample"),
    (wrong.NeedsValuesPerToken, {"answers"}, "nothing per token"),
    (wrong.TableOfIds, {"answers"}, "refuses the outputs of"),
    (wrong.DividesEveryPart, {"answers"}, "ZeroDivisionError"),
    (wrong.CutsIdsTo32Bits, {"one_rank"}, "is missing where"),
    (wrong.MeanOfRanks, {"metrics"}, "each part's mean counts alike"),
    (wrong.ExtremesOfTheFirstRank, {"metrics"}, "do not combine by m"),
    (wrong.DropsWhatIsNotFinite, {"metrics"}, "the metric 'not_a_number' is lost"),
    (wrong.ForgetsIdleRanks, {"metrics"}, "the metric 'of_idle' is lost"),
    (wrong.FieldsOfTheFirstRank, {"values"}, "Keep all fields"),
    (wrong.ExpectsTheWholeBatch, {"answers"}, "are not those of the plan"),
    (wrong.ThroughFloat64, {"one_rank"}, "is missing where"),
    (wrong.RemembersPlaces, {"own_memory"}, "than a merger that has merged nothing yet"),
    (wrong.RefusesTwoMiniBatchesOfTwo, {"answers"}, "two mini-batches of two ranks"),
    (wrong.ForgetsEveryTwentieth, {"metrics", "own_memory"}, "Keep nothing between calls"),
    (wrong.OrderOfIds, {"order"}, "belongs"),
    (wrong.ThroughHalfPrecision, {"values"}, "where the ranks returned"),
    (wrong.MendsNaN, {"values"}, "where the ranks returned"),
    (wrong.LosesNegativeZeros, {"values"}, "where the ranks returned"),
    (wrong.KnowsTwoFields, {"values"}, "Keep all fields"),
    (wrong.MetricsOfTheFirstRank, {"metrics"}, "is lost"),
    (wrong.MeansAsSums, {"metrics"}, "comes back as a sum, not as a mean"),
    (wrong.ReusesItsMemory, {"own_memory"}, "Return memory of its own from every call"),
    (wrong.SilentWhereTheLastIsMissing, {"missing_samples"}, "says nothing where sample"),
    (wrong.SeesRepeatsOfARank, {"duplicated_samples"}, "comes twice"),
    (wrong.AddsUpOverCalls, {"own_memory"}, "otherwise a second time"),
]
FAULTS = [*DAILY, *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY)]
ODD = [
    wrong.CountsItsCalls,
    *(pytest.param(each, marks=pytest.mark.nightly) for each in (wrong.SampleBySample, wrong.FieldsByName)),
]


def name_class(value):
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("fault", "promises", "words"), FAULTS, ids=name_class)
def test_a_wrong_merger_breaks_its_promise(fault, promises, words):
    broken = broken_by(fault, promises)
    breaking.require_broken(broken, promises, words)


def test_what_the_faults_are_made_of_is_right():
    assert broken_by(wrong.Plain) == {}


@pytest.mark.parametrize("right", ODD, ids=name_class)
def test_an_odd_merger_that_is_right_breaks_none(right):
    assert broken_by(right, VALID) == {}


def test_every_promise_to_mergers_is_broken_by_something():
    of_any_plugin = {
        "config_round_trip",
        "light_import",
        "process_settings",
        "another_rank",
        "another_process",
    }  # broken by others in this folder
    assert {promise.name for promise in MERGER_PROMISES} == {name for _, names, _ in DAILY for name in names} | of_any_plugin
