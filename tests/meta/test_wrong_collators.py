"""Collators that are wrong on purpose must fail the suite, each in the test that is about its fault."""

import pytest
import wrong_collators as wrong
from attrs import evolve
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from skyrl_engine.testing.collators.strategies import layouts
from skyrl_engine.testing.collators.suite import CollatorConformance
from skyrl_engine_collators.packed import reference as packed_reference
from skyrl_engine_collators.padded import reference

QUICK = settings(
    phases=[Phase.generate],
    max_examples=300,
    database=None,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

PLANS = "test_plans_cover_every_sample_once_and_cut_nothing_that_belongs_together"
BUILDS = "test_builds_hold_their_samples_and_score_from_predecessors"
REFERENCE = "test_fields_equal_the_reference"
COLLATE = "test_builds_of_one_width_make_up_collate"
REUSED = "test_reused_memory_changes_nothing"
EXTRAS = "test_expert_routes_and_images_lie_at_their_samples"
FIELDS = "test_fields_are_built_when_asked_for_and_absent_columns_stay_absent"

FAULTS = [
    (wrong.DropsASample, PLANS),
    (wrong.LeavesRanksUneven, PLANS),
    (wrong.CutsUnits, PLANS),
    (wrong.CutsGroups, PLANS),
    (wrong.IgnoresTheBudget, PLANS),
    (wrong.IgnoresTheMiniBatchSize, PLANS),
    (wrong.PlansDifferentlyEachTime, PLANS),
    (wrong.CarriesSomethingUnheardOf, PLANS),
    (wrong.ScoresFromTheTokenItself, BUILDS),
    (wrong.ScoresTheFirstToken, BUILDS),
    (wrong.CountsPositionsFromTheEdge, BUILDS),
    (wrong.CutsIdsTo32Bits, BUILDS),
    (wrong.PadsRoutesWithZeros, EXTRAS),
    (wrong.TakesRoutesForASuffix, EXTRAS),
    (wrong.MasksNoRoute, EXTRAS),
    (wrong.MasksPaddingAlone, EXTRAS),
    (wrong.NarrowsRoutes, EXTRAS),
    (wrong.WidensRoutes, EXTRAS),
    (wrong.LeavesOutRoutes, EXTRAS),
    (wrong.ReversesImages, EXTRAS),
    (wrong.SharesImagesEvenly, EXTRAS),
    (wrong.LeavesOutWhoseImagesTheyAre, EXTRAS),
    (wrong.AlignsTokenTypesLeft, EXTRAS),
    (wrong.LosesNegativeZeros, REFERENCE),
    (wrong.GivesDoubles, REFERENCE),
    (wrong.AlignsLeft, REFERENCE),
    (wrong.CollatesInAnotherOrder, COLLATE),
    (wrong.TrustsReusedMemory, REUSED),
    (wrong.InventsAColumn, FIELDS),
    (wrong.IgnoresTheFieldsAskedFor, FIELDS),
]
PACKED_FAULTS = [
    (wrong.SaysItPads, PLANS),
    (wrong.ForgetsTheAlignment, BUILDS),
    (wrong.LeavesOutTheBounds, BUILDS),
    (wrong.BoundsTrueLengths, BUILDS),
    (wrong.CountsPositionsThroughTheRow, BUILDS),
    (wrong.CapturesThroughTheGaps, EXTRAS),
    (wrong.RunsRoutesTogether, EXTRAS),
    (wrong.WeighsTheTokenItself, REFERENCE),
]


@pytest.mark.parametrize(("collator_class", "test"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_collator_fails(collator_class, test):
    class Suite(CollatorConformance):
        def collator(self):
            return collator_class()

        def reference(self, columns, micro_batch):
            return reference.build_fields(columns, micro_batch, 7)

    with pytest.raises((AssertionError, IndexError)):
        QUICK(given(st.data())(getattr(Suite, test).hypothesis.inner_test))(Suite())


@pytest.mark.parametrize(("collator_class", "test"), PACKED_FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_wrong_packed_collator_fails(collator_class, test):
    class Suite(CollatorConformance):
        def collator(self):
            return collator_class()

        def reference(self, columns, micro_batch):
            return packed_reference.build_fields(columns, micro_batch, 7)

        def layouts(self, lengths):
            return layouts(lengths).map(lambda layout: evolve(layout, micro_batch_rows=None))

    with pytest.raises(AssertionError):
        QUICK(given(st.data())(getattr(Suite, test).hypothesis.inner_test))(Suite())


def test_a_collator_that_carries_nothing_is_held_to_samples_without_extras():
    class CarriesNothing(wrong.Delegating):
        carries = frozenset()

        def build(self, columns, micro_batch, *, fields=None, out=None):
            assert not columns.extras
            return super().build(columns, micro_batch, fields=fields, out=out)

    class Suite(CollatorConformance):
        def collator(self):
            return CarriesNothing()

    for name in (EXTRAS, FIELDS):
        QUICK(given(st.data())(getattr(Suite, name).hypothesis.inner_test))(Suite())
