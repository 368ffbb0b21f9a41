"""Families of wrong losses, corrections and reducers: the first of each by day, all of them at night; odd ones that are right pass."""

from functools import partial

import breaking
import numpy as np
import odd_losses
import pytest
import torch
import wrong_corrections
import wrong_losses
import wrong_losses_by_family as losses
import wrong_reducers

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
    "tests/meta/odd_losses.py",
    "tests/meta/wrong_losses_by_family.py",
    "tests/meta/wrong_losses.py",
    "tests/meta/wrong_corrections.py",
    "tests/meta/wrong_reducers.py",
)

LOSS, CORRECTION, REDUCER = LOSS_PROMISES, CORRECTION_PROMISES, REDUCER_PROMISES

FAMILIES = {
    "loss on the CPU alone": [
        (LOSS, losses.MakesAnArange, "devices", "mul mixes devices: a tensor of shape"),
        (LOSS, losses.ThroughNumPy, "devices", ".numpy() reads a tensor that is not on the CPU, at wrong_losses_by_family.py:"),
        (LOSS, losses.LooksUpAModulesTable, "devices", "works on the CPU alone"),
        (LOSS, losses.LooksUpACachedTable, "devices", "works on the CPU alone"),
        (LOSS, losses.HoldsATable, "devices", "works on the CPU alone"),
        (LOSS, losses.GradientOfTheCPU, "devices", "works on the CPU alone"),
        (LOSS, losses.ReturnsFromTheCPU, "devices", "returns a tensor of the CPU"),
        (LOSS, losses.AddsUpOnTheCPU, "devices", "index_add mixes devices"),
    ],
    "collective": [
        (LOSS, losses.CallsACollective, "devices", "calls the collective"),
        (CORRECTION, wrong_corrections.MeanOverRanks, "devices", "calls the collective"),
    ],
    "metric of nothing": [
        (LOSS, losses.CountsAtLeastOne, "empty_metrics", "without tokens it reports a count other than 0"),
        (LOSS, losses.LeastOfNothing, "empty_metrics", "reports a number that counts in the min"),
        (LOSS, losses.LargestOfNothing, "empty_metrics", "reports a number that counts in the max"),
        (LOSS, losses.SumOfNothing, "empty_metrics", "reports a number that counts in the sum"),
    ],
    "metric of several tokens": [
        (LOSS, losses.DeviationOfSeveral, "metrics", "the metric 'spread'"),
        (LOSS, losses.MeasuresTheFewest, "metrics", "of its micro-batches is missing in the whole"),
    ],
    "gradient of the oracle": [
        (LOSS, losses.HalfDetachedRatio, "oracle", "has the oracle's values and another gradient: by logprobs"),
        (LOSS, losses.StraightThrough, "oracle", "has the oracle's values and another gradient"),
        (LOSS, losses.TurnedGradient, "oracle", "has the oracle's values and another gradient"),
        (LOSS, losses.TripledGradient, "oracle", "has the oracle's values and another gradient"),
        (LOSS, losses.UndetachedAdvantage, "oracle", "another gradient: by values"),
    ],
    "far from the old policy": [
        (LOSS, losses.UnboundedRatio, "one_finite_value_per_token", "inf"),
        (LOSS, losses.SquaresItsRatio, "one_finite_value_per_token", "inf"),
        (LOSS, losses.WeighsByExpAdvantage, "one_finite_value_per_token", "inf"),
        (CORRECTION, wrong_corrections.FarFromTheSampler, "finite_factors", "returned the factor inf"),
    ],
    "micro-batch with one that is far": [
        (LOSS, losses.SkipsWhereFar, "micro_batch_split", "under two micro-batches"),
        (CORRECTION, wrong_corrections.VetoesTheMicroBatch, "micro_batch_split", "under two micro-batches"),
    ],
    "shift over the border of a sequence": [
        (LOSS, losses.ShiftsTheReference, "micro_batch_split sample_order packing", "only the first token of a sequence changes"),
        (
            LOSS,
            losses.ShiftsTheReferenceBack,
            "micro_batch_split sample_order packing",
            "only the last token of a sequence changes",
        ),
    ],
    "structure of a reducer": [
        (REDUCER, wrong_reducers.CountsByTheHighestNumber, "labels", "it takes an id for a number"),
        (REDUCER, wrong_reducers.NeedsALength, "finite_weights", "TypeError"),
    ],
    "many sequences": [
        (LOSS, losses.RoomForEight, "needs", "failed in its call"),
        (LOSS, losses.HalvesMany, "micro_batch_split", "under two micro-batches"),
        (LOSS, losses.MakesOnesForMany, "devices", "works on the CPU alone"),
        (CORRECTION, wrong_corrections.CorrectionForEight, "needs", "failed in its call"),
        (REDUCER, wrong_reducers.ReducerForEight, "finite_weights", "IndexError"),
        (REDUCER, wrong_reducers.NoMoreThanSix, "weights_sum", "the weights sum to 1.5"),
    ],
    "empty member of a unit": [(LOSS, losses.NanInAUnit, "one_finite_value_per_token", "nan")],
    "close ids": [
        (LOSS, losses.UnitsAsFloats, "labels", "it takes an id for a number"),
        (CORRECTION, wrong_corrections.CorrectionOfFloatIds, "labels", "it takes an id for a number"),
        (REDUCER, wrong_reducers.GroupsAsFloats, "labels", "it takes an id for a number"),
        (LOSS, losses.UnitsIn32Bits, "labels", "it takes an id for a number"),
        (REDUCER, wrong_reducers.GroupsIn32Bits, "labels", "it takes an id for a number"),
    ],
    "random numbers": [
        (LOSS, losses.DrawsUndeclared, "micro_batch_split sample_order padding", "it draws random numbers, and which of them"),
    ],
    "hash of a text": [
        (LOSS, losses.HashesAText, "replicas", "takes hash() of a text"),
        (CORRECTION, wrong_corrections.CorrectionByHash, "replicas", "takes hash() of a text"),
    ],
    "options": [(LOSS, losses.counts_in_its_options, "replicas", "changes its options")],
    "evaluation": [
        (LOSS, losses.LearnsOtherThanItScores, "evaluation", "changes x2.00 where no gradient is asked for"),
        (LOSS, losses.MeasuresInTrainingAlone, "evaluation", "reports the metrics {} and not {'worth'"),
        (LOSS, losses.AsksForTheGradientMode, "evaluation", "where no gradient is asked for"),
        (LOSS, losses.DifferentiatesInside, "evaluation", "fails where no gradient is asked for"),
    ],
    "all of the probability": [(LOSS, losses.DividesTheTeachersRest, "one_finite_value_per_token", "nan")],
    "tensors that stay": [(LOSS, losses.RemembersItsMeans, "memory", "3 calls leave 3 more")],
    "cause of a cut": [
        (LOSS, losses.DividesByTheLongest, "micro_batch_split", "it depends on which samples share its micro-batch"),
        (LOSS, losses.SubtractsTheLargest, "micro_batch_split packing", "under two micro-batches"),
    ],
    "gradient by hand": [(LOSS, losses.ForgetsItsBound, "gradient", "something is rounded, or differentiated by hand")],
    "correction and its oracle": [
        (CORRECTION, wrong_corrections.UpsideDown, "oracle", "the ratio is upside down"),
        (CORRECTION, wrong_corrections.OfAnotherToken, "oracle", "is not what the oracle gives"),
    ],
    "casts of a correction": [
        (CORRECTION, wrong_corrections.Halves, "precision", "computes in torch.float16"),
        (CORRECTION, wrong_corrections.CorrectionInAByte, "precision", "to torch.uint8, which holds no more than 255"),
    ],
    "correction on the CPU alone": [
        (CORRECTION, wrong_corrections.MaskOfTheCPU, "devices", "mixes devices"),
        (CORRECTION, wrong_corrections.CorrectionByNumPy, "devices", ".numpy() reads"),
    ],
    "data without groups": [(REDUCER, wrong_reducers.FailsWithoutGroups, "finite_weights", "KeyError")],
    "masks of 300 tokens": [(REDUCER, wrong_reducers.MassOfBytes, "weights_sum", "the weights sum to")],
}


def by_family(families):
    """One parameter per plugin, of which the first of its family is tried by day."""
    return [
        pytest.param(*member, id=f"{family}-{member[1].__name__}", marks=[pytest.mark.nightly] if place else [])
        for family, members in families.items()
        for place, member in enumerate(members)
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
        (losses.SetsMatmulPrecision, "leaves the precision of matrix products at medium"),
        (losses.TurnsAnomalyModeOn, "leaves the anomaly detection (mode) at True"),
        (losses.SilencesWarnings, "changes the filters of warnings"),
        (losses.SetsErrorsOfNumPy, "leaves the errors of NumPy (under) at raise"),
        (losses.WritesTheEnvironment, "changes the environment variables"),
    ]
}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(*setting, id=setting[0].__name__, marks=[pytest.mark.nightly] if place else [])
        for place, setting in enumerate(SETTINGS["settings of the process"])
    ],
)
def test_settings_of_the_process_are_put_back(fault, words):
    (promised,) = [promise for promise in LOSS_PROMISES if promise.name == "process_settings"]
    before = settings_of_process()
    finding = promised.hold(Subject("test", fault), examples=5)
    assert finding.status == "broken"
    assert words in finding.cause
    assert settings_of_process() == before


RIGHT = {
    "odd and right": [
        (LOSS, odd_losses.MakesItsPlaces),
        (LOSS, odd_losses.HoldsANumber),
        (LOSS, odd_losses.MeasuresExtremes),
        (LOSS, odd_losses.MeasuresSometimes),
        (LOSS, odd_losses.MeasuresPairsOfTokens),
        (LOSS, odd_losses.DrawsNumbers),
        (LOSS, odd_losses.RightGradientByHand),
        (LOSS, odd_losses.ReadsItsLengths),
        (LOSS, odd_losses.CatchesWarnings),
        (LOSS, odd_losses.HashesNumbers),
        (LOSS, losses.Ratios),
        (LOSS, losses.BoundsTheTeachersRest),
        (LOSS, odd_losses.HoldsATablePerDevice),
        (LOSS, odd_losses.DetachesInPlace),
        (CORRECTION, wrong_corrections.CorrectionByUnits),
        (CORRECTION, wrong_corrections.DrawsInItsPrecision),
        (REDUCER, wrong_reducers.RefusesDataWithoutGroups),
    ]
}


@pytest.mark.parametrize(("promises", "right"), by_family(RIGHT))
def test_what_is_odd_and_right_breaks_nothing(promises, right):
    assert broken_by(promises, right) == {}


def test_a_counterexample_of_a_reducer_holds_no_sequence_that_does_not_matter():
    class Halved(wrong_reducers.Plain):
        def of(self, structure, weight):
            return super().of(structure, weight) * np.where(weight == np.float32(1 / 3), 0, 1)

    (promised,) = [promise for promise in REDUCER_PROMISES if promise.name == "loss_weights_decide"]
    finding = promised.hold(Subject("test", Halved), examples=100)
    assert finding.counterexample == ("sequence 0 has the loss weights 0.333333",)


def test_an_oracle_without_a_gradient_is_compared_by_its_values():
    def due(tokens):
        return losses.Ratios().oracle(tokens).detach()

    findings = breaking.broken_by(LOSS, losses.HalfDetachedRatio, {"oracle"}, examples=5, hooks={"oracle": due})
    assert findings == {}


def test_no_process_group_is_left_behind():
    (promised,) = [promise for promise in LOSS_PROMISES if promise.name == "devices"]
    assert promised.hold(Subject("test", partial(wrong_losses.Plain))).status == "kept"
    assert not torch.distributed.is_initialized()
