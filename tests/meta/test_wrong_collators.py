"""Collators that are wrong on purpose must break the promise that is about their fault."""

import pytest
import wrong_collators as wrong
from attrs import evolve

from skyrl_engine.testing.collators.promises import COLLATOR_PROMISES
from skyrl_engine.testing.collators.strategies import layouts
from skyrl_engine.testing.subject import Subject
from skyrl_engine_collators.packed import reference as packed_reference
from skyrl_engine_collators.padded import reference

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/workers",
    "plugins/collators/src",
    "tests/meta/wrong_collators.py",
)

PROMISES = {each.name: each for each in COLLATOR_PROMISES}
EXAMPLES = 300
"""Cases of the promise that is broken, at most."""

FAULTS = [
    (wrong.DropsASample, "samples_once"),
    (wrong.LeavesRanksUneven, "ranks_in_step"),
    (wrong.CutsUnits, "groups_and_units"),
    (wrong.CutsGroups, "groups_and_units"),
    (wrong.IgnoresTheBudget, "sizes"),
    (wrong.IgnoresTheMiniBatchSize, "sizes"),
    (wrong.PlansRowsTooNarrow, "rows"),
    (wrong.PlansDifferentlyEachTime, "same_plan"),
    (wrong.CarriesSomethingUnheardOf, "declarations"),
    (wrong.ScoresFromTheTokenItself, "predecessors"),
    (wrong.ScoresTheFirstToken, "predecessors"),
    (wrong.CountsPositionsFromTheEdge, "tokens"),
    (wrong.CutsIdsTo32Bits, "tokens"),
    (wrong.PadsRoutesWithZeros, "expert_routes"),
    (wrong.TakesRoutesForASuffix, "expert_routes"),
    (wrong.MasksNoRoute, "expert_routes"),
    (wrong.MasksPaddingAlone, "expert_routes"),
    (wrong.NarrowsRoutes, "expert_routes"),
    (wrong.WidensRoutes, "expert_routes"),
    (wrong.LeavesOutRoutes, "expert_routes"),
    (wrong.ReversesImages, "images"),
    (wrong.SharesImagesEvenly, "images"),
    (wrong.LeavesOutWhoseImagesTheyAre, "images"),
    (wrong.AlignsTokenTypesLeft, "images"),
    (wrong.LosesNegativeZeros, "reference"),
    (wrong.GivesDoubles, "reference"),
    (wrong.AlignsLeft, "reference"),
    (wrong.PadsWithTheNumberOfRows, "rows_alone"),
    (wrong.TurnsRowsWithTheBatch, "rows_alone"),
    (wrong.BuildsIntoTheSameMemory, "own_memory"),
    (wrong.CountsItsBuilds, "own_memory"),
    (wrong.InventsAColumn, "fields"),
    (wrong.IgnoresTheFieldsAskedFor, "fields"),
    (wrong.TurnsTwoBuffers, "own_memory"),
    (wrong.WeighsPadding, "numbers"),
]
PACKED_FAULTS = [
    (wrong.SaysItPads, "declarations"),
    (wrong.ForgetsTheAlignment, "bounds"),
    (wrong.LeavesOutTheBounds, "bounds"),
    (wrong.BoundsTrueLengths, "bounds"),
    (wrong.CountsPositionsThroughTheRow, "tokens"),
    (wrong.CapturesThroughTheGaps, "expert_routes"),
    (wrong.RunsRoutesTogether, "expert_routes"),
    (wrong.WeighsTheTokenItself, "reference"),
]


NIGHTLY = [
    (wrong.ShowsTheSamples, "own_memory"),
    (wrong.KeepsOneGatherIndex, "own_memory"),
    (wrong.LosesNegativeZeros, "numbers"),
    (wrong.GivesDoubles, "numbers"),
    (wrong.AlignsLeft, "numbers"),
    (wrong.SwapsColumns, "numbers"),
    (wrong.TakesWeightsForAMask, "numbers"),
    (wrong.CountsPositionsInABytes, "tokens"),
    (wrong.KnowsSixteenSamples, "samples_once"),
    (wrong.NeedsASample, "tokens"),
    (wrong.PlansByCount, "same_plan"),
]
NIGHTLY_PACKED = [(wrong.WeighsTheTokenItself, "numbers")]
ODD = [wrong.AtTheTokens, pytest.param(wrong.RoundsWidths, marks=pytest.mark.nightly)]

HOOKS = {"reference": lambda columns, micro_batch: reference.build_fields(columns, micro_batch, 7)}
PACKED_HOOKS = {
    "reference": lambda columns, micro_batch: packed_reference.build_fields(columns, micro_batch, 7),
    "layouts": lambda lengths: layouts(lengths).map(lambda layout: evolve(layout, micro_batch_rows=None)),
}

WITHOUT_ROWS = {"layouts": PACKED_HOOKS["layouts"]}


@pytest.mark.parametrize(
    ("collator_class", "promise", "hooks"),
    [
        *((*fault, HOOKS) for fault in FAULTS),
        *((*fault, PACKED_HOOKS) for fault in PACKED_FAULTS),
        *(pytest.param(*fault, {}, marks=pytest.mark.nightly) for fault in NIGHTLY),
        *(pytest.param(*fault, WITHOUT_ROWS, marks=pytest.mark.nightly) for fault in NIGHTLY_PACKED),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
)
def test_a_wrong_collator_breaks_the_promise_about_its_fault(collator_class, promise, hooks):
    finding = PROMISES[promise].hold(Subject("wrong", collator_class, hooks=hooks), examples=EXAMPLES, shrink=False)
    assert finding.status == "broken", finding
    assert finding.counterexample, "the case is told"


@pytest.mark.parametrize("right", ODD, ids=lambda each: each.__name__)
def test_an_odd_collator_that_is_right_breaks_none(right):
    for each in PROMISES.values():
        if each.name not in ("config_round_trip", "light_import"):
            assert each.hold(Subject("odd", right), examples=20).status in ("kept", "not claimed"), each.name


def test_every_promise_about_plans_and_builds_is_broken_by_someone():
    of_the_plugin = {"config_round_trip", "pickling", "light_import", "process_settings", "another_rank"}
    assert {promise for _, promise in (*FAULTS, *PACKED_FAULTS)} == PROMISES.keys() - of_the_plugin


def test_a_collator_that_carries_nothing_is_held_to_samples_without_extras():
    class CarriesNothing(wrong.Delegating):
        carries = frozenset()

        def build(self, columns, micro_batch, *, fields=None):
            assert not columns.extras
            return super().build(columns, micro_batch, fields=fields)

    for name in ("expert_routes", "images", "fields"):
        assert PROMISES[name].hold(Subject("bare", CarriesNothing)).status == "kept"
