"""Families of wrong losses, corrections and reducers: the first of each by day, all of them at night; odd ones that are right pass."""

from functools import partial

import breaking
import numpy as np
import pytest
import torch
import wrong_by_family as wrong

from skyrl_engine.testing import Subject
from skyrl_engine.testing.corrections.promises import CORRECTION_PROMISES
from skyrl_engine.testing.losses.promises import LOSS_PROMISES
from skyrl_engine.testing.process_settings import settings_of_process
from skyrl_engine.testing.reducers.promises import REDUCER_PROMISES

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/objective",
    "skyrl_engine/workers",
    "tests/meta/breaking.py",
    "tests/meta/wrong_by_family.py",
    "tests/meta/wrong_losses.py",
    "tests/meta/wrong_corrections.py",
    "tests/meta/wrong_reducers.py",
)

LOSS, CORRECTION, REDUCER = LOSS_PROMISES, CORRECTION_PROMISES, REDUCER_PROMISES

FAMILIES = {
    "loss on the CPU alone": [
        (LOSS, wrong.MakesAnArange, "devices", "mul mixes devices: a tensor of shape"),
        (LOSS, wrong.ThroughNumPy, "devices", ".numpy() reads a tensor that is not on the CPU, at wrong_by_family.py:"),
        (LOSS, wrong.LooksUpAModulesTable, "devices", "works on the CPU alone"),
        (LOSS, wrong.HoldsATable, "devices", "works on the CPU alone"),
        (LOSS, wrong.GradientOfTheCPU, "devices", "works on the CPU alone"),
        (LOSS, wrong.ReturnsFromTheCPU, "devices", "returns a tensor of the CPU"),
        (LOSS, wrong.AddsUpOnTheCPU, "devices", "index_add mixes devices"),
    ],
    "collective": [
        (LOSS, wrong.CallsACollective, "devices", "calls the collective"),
        (CORRECTION, wrong.MeanOverRanks, "devices", "calls the collective"),
    ],
    "metric of nothing": [
        (LOSS, wrong.CountsAtLeastOne, "empty_metrics", "without tokens it reports a count other than 0"),
        (LOSS, wrong.LeastOfNothing, "empty_metrics", "reports a number that counts in the min"),
        (LOSS, wrong.LargestOfNothing, "empty_metrics", "reports a number that counts in the max"),
        (LOSS, wrong.SumOfNothing, "empty_metrics", "reports a number that counts in the sum"),
    ],
    "metric of several tokens": [
        (LOSS, wrong.DeviationOfSeveral, "metrics", "the metric 'spread'"),
        (LOSS, wrong.MeasuresTheFewest, "metrics", "of its micro-batches is missing in the whole"),
    ],
    "gradient of the oracle": [
        (LOSS, wrong.HalfDetachedRatio, "oracle", "has the oracle's values and another gradient: by logprobs"),
        (LOSS, wrong.StraightThrough, "oracle", "has the oracle's values and another gradient"),
        (LOSS, wrong.TurnedGradient, "oracle", "has the oracle's values and another gradient"),
        (LOSS, wrong.TripledGradient, "oracle", "has the oracle's values and another gradient"),
        (LOSS, wrong.UndetachedAdvantage, "oracle", "another gradient: by values"),
    ],
    "far from the old policy": [
        (LOSS, wrong.UnboundedRatio, "one_finite_value_per_token", "inf"),
        (LOSS, wrong.SquaresItsRatio, "one_finite_value_per_token", "inf"),
        (LOSS, wrong.WeighsByExpAdvantage, "one_finite_value_per_token", "inf"),
        (CORRECTION, wrong.FarFromTheSampler, "finite_factors", "returned the factor inf"),
    ],
    "many sequences": [
        (LOSS, wrong.RoomForEight, "needs", "failed in its call"),
        (LOSS, wrong.HalvesMany, "micro_batch_split", "under two micro-batches"),
        (LOSS, wrong.MakesOnesForMany, "devices", "works on the CPU alone"),
        (CORRECTION, wrong.CorrectionForEight, "needs", "failed in its call"),
        (REDUCER, wrong.ReducerForEight, "finite_weights", "IndexError"),
        (REDUCER, wrong.NoMoreThanSix, "weights_sum", "the weights sum to 1.5"),
    ],
    "empty member of a unit": [(LOSS, wrong.NanInAUnit, "one_finite_value_per_token", "nan")],
    "close ids": [
        (LOSS, wrong.UnitsAsFloats, "labels", "it takes an id for a number"),
        (CORRECTION, wrong.CorrectionOfFloatIds, "labels", "it takes an id for a number"),
        (REDUCER, wrong.GroupsAsFloats, "labels", "it takes an id for a number"),
    ],
    "hash of a text": [
        (LOSS, wrong.HashesAText, "replicas", "takes hash() of a text"),
        (CORRECTION, wrong.CorrectionByHash, "replicas", "takes hash() of a text"),
    ],
    "options": [(LOSS, wrong.counts_in_its_options, "replicas", "changes its options")],
    "evaluation": [
        (LOSS, wrong.LearnsOtherThanItScores, "evaluation", "changes x2.00 where no gradient is asked for"),
        (LOSS, wrong.AsksForTheGradientMode, "evaluation", "where no gradient is asked for"),
        (LOSS, wrong.DifferentiatesInside, "evaluation", "fails where no gradient is asked for"),
    ],
    "correction and its oracle": [
        (CORRECTION, wrong.UpsideDown, "oracle", "the ratio is upside down"),
        (CORRECTION, wrong.OfAnotherToken, "oracle", "is not what the oracle gives"),
    ],
    "casts of a correction": [
        (CORRECTION, wrong.Halves, "precision", "computes in torch.float16"),
        (CORRECTION, wrong.CorrectionInAByte, "precision", "to torch.uint8, which holds no more than 255"),
    ],
    "correction on the CPU alone": [
        (CORRECTION, wrong.MaskOfTheCPU, "devices", "mixes devices"),
        (CORRECTION, wrong.CorrectionByNumPy, "devices", ".numpy() reads"),
    ],
    "data without groups": [(REDUCER, wrong.FailsWithoutGroups, "finite_weights", "KeyError")],
    "masks of 300 tokens": [(REDUCER, wrong.MassOfBytes, "weights_sum", "the weights sum to")],
}


def by_family(families):
    """One parameter per plugin, of which the first of its family is tried by day."""
    return [
        pytest.param(*each, id=f"{family}-{each[1].__name__}", marks=[pytest.mark.nightly] if place else [])
        for family, members in families.items()
        for place, each in enumerate(members)
    ]


def broken_by(promises, make, suspected=()):
    hooks = {"oracle": make().oracle} if hasattr(make, "oracle") else {}
    return breaking.broken_by(promises, make, suspected, examples=30, hooks=hooks)


@pytest.mark.parametrize(("promises", "fault", "names", "words"), by_family(FAMILIES))
def test_a_wrong_plugin_breaks_its_promise(promises, fault, names, words):
    broken = broken_by(promises, fault, set(names.split()))
    breaking.require_broken(broken, set(names.split()), words)


SETTINGS = {
    "settings of the process": [
        (wrong.SetsMatmulPrecision, "leaves the precision of matrix products at medium"),
        (wrong.TurnsAnomalyModeOn, "leaves the anomaly detection (mode) at True"),
        (wrong.SilencesWarnings, "changes the filters of warnings"),
        (wrong.SetsErrorsOfNumPy, "leaves the errors of NumPy (under) at raise"),
        (wrong.WritesTheEnvironment, "changes the environment variables"),
    ]
}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(*each, id=each[0].__name__, marks=[pytest.mark.nightly] if place else [])
        for place, each in enumerate(SETTINGS["settings of the process"])
    ],
)
def test_settings_of_the_process_are_put_back(fault, words):
    (promised,) = [each for each in LOSS_PROMISES if each.name == "process_settings"]
    before = settings_of_process()
    finding = promised.hold(Subject("test", fault), examples=5)
    assert finding.status == "broken"
    assert words in finding.cause
    assert settings_of_process() == before


RIGHT = {
    "odd and right": [
        (LOSS, wrong.MakesItsPlaces),
        (LOSS, wrong.HoldsANumber),
        (LOSS, wrong.MeasuresExtremes),
        (LOSS, wrong.MeasuresSometimes),
        (LOSS, wrong.MeasuresPairsOfTokens),
        (LOSS, wrong.DrawsNumbers),
        (LOSS, wrong.RightGradientByHand),
        (LOSS, wrong.ReadsItsLengths),
        (LOSS, wrong.CatchesWarnings),
        (LOSS, wrong.HashesNumbers),
        (LOSS, wrong.Ratios),
        (CORRECTION, wrong.CorrectionByUnits),
        (REDUCER, wrong.RefusesDataWithoutGroups),
    ]
}


@pytest.mark.parametrize(("promises", "right"), by_family(RIGHT))
def test_what_is_odd_and_right_breaks_nothing(promises, right):
    assert broken_by(promises, right) == {}


def test_a_counterexample_of_a_reducer_holds_no_sequence_that_does_not_matter():
    class Halved(wrong.wrong_reducers.Plain):
        def of(self, structure, weight):
            return super().of(structure, weight) * np.where(weight == np.float32(1 / 3), 0, 1)

    (promised,) = [each for each in REDUCER_PROMISES if each.name == "loss_weights_decide"]
    finding = promised.hold(Subject("test", Halved), examples=100)
    assert finding.counterexample == ("sequence 0 has the loss weights 0.333333",)


def test_an_oracle_without_a_gradient_is_compared_by_its_values():
    def due(tokens):
        return wrong.Ratios().oracle(tokens).detach()

    findings = breaking.broken_by(LOSS, wrong.HalfDetachedRatio, {"oracle"}, examples=5, hooks={"oracle": due})
    assert findings == {}


def test_no_process_group_is_left_behind():
    (promised,) = [each for each in LOSS_PROMISES if each.name == "devices"]
    assert promised.hold(Subject("test", partial(wrong.wrong_losses.Plain))).status == "kept"
    assert not torch.distributed.is_initialized()
