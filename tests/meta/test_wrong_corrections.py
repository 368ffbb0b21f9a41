"""Every promise to corrections is broken by something."""

from functools import partial

import breaking
import pytest
import wrong_corrections as wrong

from skyrl_engine.testing.corrections.promises import CORRECTION_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/objective",
    "skyrl_engine/workers",
    "tests/meta/breaking.py",
    "tests/meta/wrong_corrections.py",
)

broken_by = partial(breaking.broken_by, CORRECTION_PROMISES, examples=50)

FAULTS = [
    (wrong.NormalisedOverTheBatch, {"micro_batch_split", "packing"}, "under two micro-batches: it divides by"),
    (wrong.Unclamped, {"finite_factors"}, "clamp what goes into exp()"),
    (wrong.BelowZero, {"finite_factors"}, "returned the factor -"),
    (wrong.Learns, {"detached"}, "its factors require a gradient"),
    (wrong.CountsCalls, {"rank_split"}, "it keeps something from one call to the next"),
    (wrong.DropsTheFirst, {"micro_batch_split", "sample_order", "padding"}, "it depends on the place of a token among the n"),
    (wrong.MeanBesideEmpty, {"padding", "finite_factors"}, "fails beside a sequence without tokens"),
    (wrong.FailsWithoutTokens, {"all_masked"}, "fails without a token"),
    (wrong.CrashesInTheWordsOfTheEngine, {"needs"}, "failed in its call: ValueError: the table returned a factor"),
    (wrong.ReadsUndeclared, {"needs"}, "tokens.rollout_logprobs"),
    (wrong.ShiftsAndBack, {"precision"}, "loses precision"),
    (wrong.DrawsGlobally, {"global_random_numbers"}, "draws from the global random state"),
    (wrong.WritesInPlace, {"inputs_unchanged"}, "changes old_logprobs in place"),
    (wrong.ChangesAfterAWhile, {"rank_split"}, "after 64 calls"),
    (wrong.AsksForItsRank, {"replicas"}, "asks which rank it is on"),
    (wrong.TakesGroupsForPlaces, {"labels"}, "fails where labels are other numbers"),
    (wrong.WritesTheSame, {"inputs_unchanged"}, "changes old_logprobs in place"),
    (wrong.SetsTheAlgorithms, {"process_settings"}, "leaves the deterministic algorithms at True"),
    (wrong.HoldsALambda, {"pickling"}, "cannot be pickled"),
]


@pytest.mark.parametrize(("fault", "promises", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_correction_breaks_its_promise(fault, promises, words):
    broken = broken_by(fault, promises)
    breaking.require_broken(broken, promises, words)


@pytest.mark.parametrize("right", [wrong.Plain, wrong.DropsByChance])
def test_what_is_right_breaks_nothing(right):
    assert broken_by(right) == {}


def test_every_promise_to_corrections_is_broken_by_something():
    of_any_plugin = {"config_round_trip", "light_import"}  # broken by losses, in this folder
    by_families = {"devices", "oracle", "another_process"}  # in test_wrong_by_family.py, and in tests/testing
    assert {promise.name for promise in CORRECTION_PROMISES} == {
        name for _, names, _ in FAULTS for name in names
    } | of_any_plugin | by_families
