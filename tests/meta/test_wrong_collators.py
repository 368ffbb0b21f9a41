"""Collators that are wrong on purpose must break the promise that is about their fault."""

import pytest
import wrong_collator_builds as builds
import wrong_collator_extras as extras
import wrong_collator_plans as plans
import wrong_collator_trees as trees
from attrs import evolve
from collators_made_wrong import Delegating

from skyrl_engine.testing.collators.promises import COLLATOR_PROMISES
from skyrl_engine.testing.collators.strategies import layouts
from skyrl_engine.testing.subject import Subject, select_plugin
from skyrl_engine_collators.packed import loops as packed_reference
from skyrl_engine_collators.padded import loops as padded_reference

pytestmark = pytest.mark.of_sources(
    "skyrl_engine/testing",
    "skyrl_engine/contracts",
    "skyrl_engine/workers",
    "plugins/collators/src",
    "tests/meta/collators_made_wrong.py",
    "tests/meta/wrong_collator_builds.py",
    "tests/meta/wrong_collator_extras.py",
    "tests/meta/wrong_collator_plans.py",
    "tests/meta/wrong_collator_trees.py",
)

PROMISES = {each.name: each for each in COLLATOR_PROMISES}
EXAMPLES = 300
"""Cases of the promise that is broken, at most."""

FAULTS = [
    (plans.DropsASample, "samples_once"),
    (plans.LeavesRanksUneven, "ranks_in_step"),
    (plans.CutsUnits, "groups_and_units"),
    (plans.CutsGroups, "groups_and_units"),
    (plans.IgnoresTheBudget, "sizes"),
    (plans.IgnoresTheMiniBatchSize, "sizes"),
    (plans.PlansRowsTooNarrow, "rows"),
    (plans.PlansDifferentlyEachTime, "same_plan"),
    (plans.CarriesSomethingUnheardOf, "declarations"),
    (builds.ScoresFromTheTokenItself, "predecessors"),
    (builds.ScoresTheFirstToken, "predecessors"),
    (builds.CountsPositionsFromTheEdge, "tokens"),
    (builds.CutsIdsTo32Bits, "tokens"),
    (extras.PadsRoutesWithZeros, "expert_routes"),
    (extras.TakesRoutesForASuffix, "expert_routes"),
    (extras.MasksNoRoute, "expert_routes"),
    (extras.MasksPaddingAlone, "expert_routes"),
    (extras.NarrowsRoutes, "expert_routes"),
    (extras.WidensRoutes, "expert_routes"),
    (extras.LeavesOutRoutes, "expert_routes"),
    (extras.ReversesImages, "images"),
    (extras.SharesImagesEvenly, "images"),
    (extras.LeavesOutWhoseImagesTheyAre, "images"),
    (extras.AlignsTokenTypesLeft, "images"),
    (builds.LosesNegativeZeros, "reference"),
    (builds.GivesDoubles, "reference"),
    (builds.AlignsLeft, "reference"),
    (builds.PadsWithTheNumberOfRows, "rows_alone"),
    (builds.TurnsRowsWithTheBatch, "rows_alone"),
    (builds.BuildsIntoTheSameMemory, "own_memory"),
    (builds.CountsItsBuilds, "own_memory"),
    (builds.InventsAColumn, "fields"),
    (builds.IgnoresTheFieldsAskedFor, "fields"),
    (builds.TurnsTwoBuffers, "own_memory"),
    (builds.PreparesByTurn, "build_order"),
    (builds.WeighsPadding, "numbers"),
    (builds.TurnsWideColumns, "numbers"),
    (builds.PadsWithTheLabelsMask, "tokens"),
    (builds.WritesIntoTheSamples, "inputs_unchanged"),
    (plans.CutsGroupsOfMany, "groups_and_units"),
    (plans.PlansWhatFitsNowhere, "nowhere"),
]
PACKED_FAULTS = [
    (builds.SaysItPads, "declarations"),
    (builds.ForgetsTheAlignment, "bounds"),
    (builds.LeavesOutTheBounds, "bounds"),
    (builds.BoundsTrueLengths, "bounds"),
    (builds.CountsPositionsThroughTheRow, "tokens"),
    (extras.CapturesThroughTheGaps, "expert_routes"),
    (extras.RunsRoutesTogether, "expert_routes"),
    (builds.WeighsTheTokenItself, "reference"),
]
TREE_FAULTS = [
    (trees.SeesItsSibling, "tokens"),
    (trees.StartsPositionsAgain, "tokens"),
    (trees.ScoresFirstTokensFromTheColumnBefore, "predecessors"),
    (trees.ScoresSharedTokensOnce, "predecessors"),
    (trees.SharesWithWhoeverComesBefore, "tokens"),
    (trees.SaysThatItSharesMore, "trees"),
    (trees.LeavesOutTheTree, "trees"),
    (trees.BoundsTrees, "bounds"),
]


NIGHTLY = [
    (builds.ShowsTheSamples, "own_memory"),
    (builds.KeepsOneGatherIndex, "own_memory"),
    (builds.LosesNegativeZeros, "numbers"),
    (builds.GivesDoubles, "numbers"),
    (builds.AlignsLeft, "numbers"),
    (builds.SwapsColumns, "numbers"),
    (builds.TakesWeightsForAMask, "numbers"),
    (builds.CountsPositionsInABytes, "tokens"),
    (plans.PlansGroupsOfAnySize, "nowhere"),
    (plans.KnowsSixteenSamples, "samples_once"),
    (builds.NeedsASample, "tokens"),
    (plans.PlansByCount, "same_plan"),
    (builds.PositionsOfPadding, "tokens"),
    (builds.CountsPositionsTo511, "tokens"),
    (builds.WeightsThatLearn, "tokens"),
    (builds.GivesADictionary, "tokens"),
    (builds.GivesListsOfPlaces, "predecessors"),
    (builds.TurnsEightBuffers, "own_memory"),
    (plans.PlansOtherwiseLater, "same_plan"),
    (plans.ReturnsAList, "samples_once"),
    (plans.SortsTheLengths, "inputs_unchanged"),
    (plans.PlansByLengths, "same_plan"),
    (builds.RemembersSampleIds, "build_order"),
    (builds.PreparesByPlace, "build_order"),
    (builds.HandsOutTwice, "own_memory"),
    (builds.ZerosForWhatIsMissing, "fields"),
]
NIGHTLY_PACKED = [(builds.WeighsTheTokenItself, "numbers"), (builds.BoundsTheWidth, "bounds")]
ODD = [
    builds.AtTheTokens,
    pytest.param(builds.LeavesWideColumnsOut, marks=pytest.mark.nightly),
    pytest.param(plans.RoundsWidths, marks=pytest.mark.nightly),
]

HOOKS = {"reference": lambda columns, micro_batch: padded_reference.build_fields(columns, micro_batch, 7)}
PACKED_HOOKS = {
    "reference": lambda columns, micro_batch: packed_reference.build_fields(columns, micro_batch, 7),
    "layouts": lambda lengths: layouts(lengths).map(lambda layout: evolve(layout, micro_batch_rows=None)),
}

TREE_HOOKS = {"layouts": lambda lengths: layouts(lengths).map(lambda layout: evolve(layout, micro_batch_rows=None, cp=1))}

WITHOUT_ROWS = {"layouts": PACKED_HOOKS["layouts"]}


@pytest.mark.parametrize(
    ("collator_class", "promise", "hooks"),
    [
        *((*fault, HOOKS) for fault in FAULTS),
        *((*fault, PACKED_HOOKS) for fault in PACKED_FAULTS),
        *((*fault, TREE_HOOKS) for fault in TREE_FAULTS),
        *(pytest.param(*fault, {}, marks=pytest.mark.nightly) for fault in NIGHTLY),
        *(pytest.param(*fault, WITHOUT_ROWS, marks=pytest.mark.nightly) for fault in NIGHTLY_PACKED),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
)
def test_a_wrong_collator_breaks_the_promise_about_its_fault(collator_class, promise, hooks):
    finding = PROMISES[promise].hold(Subject("wrong", collator_class, hooks=hooks), examples=EXAMPLES, shrink=False)
    assert finding.status == "broken", finding
    assert finding.counterexample, "the case is told"


@pytest.mark.parametrize("right", ODD, ids=lambda collator: collator.__name__)
def test_an_odd_collator_that_is_right_breaks_none(right):
    for promise in PROMISES.values():
        if promise.name not in ("config_round_trip", "light_import"):
            assert promise.hold(Subject("odd", right), examples=20).status in ("kept", "not claimed"), promise.name


def test_every_promise_about_plans_and_builds_is_broken_by_someone():
    of_the_plugin = {
        "overlong",
        "config_round_trip",
        "pickling",
        "light_import",
        "process_settings",
        "another_rank",
        "another_process",
    }
    assert {promise for _, promise in (*FAULTS, *PACKED_FAULTS, *TREE_FAULTS)} == PROMISES.keys() - of_the_plugin


LEAVES_OUT = """
import numpy as np
from attrs import evolve
from skyrl_engine import hookimpl
from skyrl_engine_collators.padded.collator import PaddedCollator


class LeavesOut(PaddedCollator):
    def plan(self, lengths, layout):
        kept = np.flatnonzero(lengths.tokens <= self.max_sequence_length)
        names = ("tokens", "actions", "sample_ids", "group_ids", "unit_ids", "trajectory_ids")
        short = evolve(lengths, **{name: getattr(lengths, name)[kept] for name in names})
        minis = [
            evolve(mini, ranks=tuple(tuple(each.renumber(kept[each.samples]) for each in rank) for rank in mini.ranks))
            for mini in super().plan(short, layout).mini_batches
        ]
        return evolve(super().plan(short, layout), mini_batches=tuple(minis), sample_ids=lengths.sample_ids)


class Plugin:
    @hookimpl
    def skyrl_engine_make_collator(self, context):
        return LeavesOut(max_sequence_length=context.max_sequence_length)


wrong = Plugin()
"""


def test_a_collator_that_leaves_long_samples_out_breaks_a_promise(tmp_path):
    """The kit tells a product of a longer limit than any sample has, and a plugin of a shorter one too."""
    (tmp_path / "leaves_out.py").write_text(LEAVES_OUT)
    held = {"./leaves_out.py:wrong": "broken", "padded": "kept", "packed": "kept"}
    for reference, status in held.items():
        subject = Subject.of_plugin(select_plugin("collator", reference, {}, base=tmp_path))
        assert PROMISES["overlong"].hold(subject, examples=20).status == status


def test_a_collator_that_carries_nothing_is_held_to_samples_without_extras():
    class CarriesNothing(Delegating):
        carries = frozenset()

        def build(self, columns, micro_batch, *, fields=None):
            assert not columns.extras
            return super().build(columns, micro_batch, fields=fields)

    for name in ("expert_routes", "images", "fields"):
        assert PROMISES[name].hold(Subject("bare", CarriesNothing)).status == "kept"
