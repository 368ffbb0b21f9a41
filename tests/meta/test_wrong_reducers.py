"""Every promise to reducers is broken by something."""

from functools import partial

import breaking
import numpy as np
import pytest
import wrong_reducers as wrong

from skyrl_engine.testing.reducers.promises import REDUCER_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/workers",
    "tests/meta/breaking.py",
    "tests/meta/wrong_reducers.py",
)

broken_by = partial(breaking.broken_by, REDUCER_PROMISES, examples=80)

FAULTS = [
    (wrong.NanWithoutLoss, {"finite_weights"}, "the weight nan"),
    (wrong.Single, {"finite_weights"}, "returned float32"),
    (wrong.Strided, {"finite_weights"}, "not contiguous"),
    (wrong.IgnoresTheLastSequence, {"loss_weights_decide", "sample_order", "empty_sequences"}, "it is lost"),
    (wrong.CountsTokensOfNoLoss, {"loss_weights_decide", "scale"}, "it counts although it carries no loss"),
    (wrong.DividesPerMicroBatch, {"micro_batch_split"}, "it divides by counts of a micro-batch"),
    (wrong.TakesNeighboursForAGroup, {"sample_order", "empty_sequences"}, "it takes neighbours for members of one group"),
    (wrong.TakesLabelsForPlaces, {"labels", "weights_sum", "empty_sequences"}, "it takes an id for a number"),
    (wrong.SaysItAdds, {"additive"}, "gradients of several are added up"),
    (wrong.TruncatesFractions, {"scale"}, "a sum of weights is rounded"),
    (wrong.NeverBelowOne, {"scale"}, "kept from falling below 1"),
    (wrong.OneTooMany, {"weights_sum"}, "the mean of a constant is x0.33"),
    (wrong.SkipsButCounts, {"empty_sequences"}, "it counts them, and declares empty_sequence = 'skip'"),
    (wrong.CountsEmptyTwice, {"empty_sequences"}, "a mean over sequences, groups or trajectories changes x0.50"),
    (wrong.TakesNegatives, {"negative_weights"}, "takes a negative loss weight"),
    (wrong.DividesInPlace, {"inputs_unchanged"}, "changes structure.micro_batch in place"),
    (wrong.Tires, {"repeatable"}, "it keeps something"),
    (wrong.TiresLate, {"repeatable"}, "it keeps something"),
    (wrong.CountsInABytesRoom, {"weights_sum"}, "the weights sum to"),
    (wrong.HalvesMany, {"weights_sum"}, "the weights sum to 0.5"),
    (wrong.HalvesLargeGroups, {"weights_sum"}, "the weights sum to 0.5"),
    (wrong.ByFirstDomain, {"sample_order"}, "in another order of sequences"),
    (wrong.Draws, {"repeatable"}, "draws from the global random state"),
    (wrong.HoldsALambda, {"pickling"}, "cannot be pickled"),
]


@pytest.mark.parametrize(("fault", "promises", "words"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_reducer_breaks_its_promise(fault, promises, words):
    broken = broken_by(fault, promises)
    breaking.require_broken(broken, promises, words)


@pytest.mark.parametrize("right", [wrong.Plain, wrong.ByDomain, wrong.ByDifficulty])
def test_what_the_faults_are_made_of_is_right(right):
    assert broken_by(right) == {}


def test_a_suite_says_which_values_samples_have():
    genres = {"genre": ("news", "fiction")}
    assert broken_by(wrong.ByGenre, hooks={"sample_values": lambda: genres}) == {}
    assert "finite_weights" in broken_by(wrong.ByGenre, {"finite_weights"})


def test_an_oracle_holds_a_reducer_to_its_formula():
    def token_mean(structure):
        return structure.loss_weight / np.float64(structure.mass.sum() or 1)

    broken = broken_by(wrong.Plain, {"oracle"}, hooks={"oracle": token_mean})
    assert set(broken) == {"oracle"}


def test_every_promise_to_reducers_is_broken_by_something():
    # above, and broken by others in this folder
    elsewhere = {"oracle", "config_round_trip", "light_import", "process_settings", "another_rank", "another_process"}
    assert {promise.name for promise in REDUCER_PROMISES} == {name for _, names, _ in FAULTS for name in names} | elsewhere
