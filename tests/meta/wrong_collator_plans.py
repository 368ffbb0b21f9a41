"""Collators whose plans are each wrong in one way."""

import numpy as np
from attrs import evolve
from collators_made_wrong import Delegating, change_ranks

from skyrl_engine import DataError
from skyrl_engine.contracts import MicroBatchPlan


class DropsASample(Delegating):
    def plan(self, lengths, layout):
        def drop(ranks):
            first = ranks[0][0]
            if not len(first.samples):
                return ranks
            offsets = np.minimum(first.row_offsets, len(first.samples) - 1)
            return ((MicroBatchPlan(first.samples[:-1], offsets, first.width, first.action_width), *ranks[0][1:]), *ranks[1:])

        return change_ranks(super().plan(lengths, layout), drop)


class LeavesRanksUneven(Delegating):
    def plan(self, lengths, layout):
        return change_ranks(
            super().plan(lengths, layout), lambda ranks: tuple(tuple(mb for mb in rank if len(mb.samples)) for rank in ranks)
        )


class CutsUnits(Delegating):
    def plan(self, lengths, layout):
        return super().plan(evolve(lengths, unit_ids=np.arange(len(lengths))), layout)


class CutsGroups(Delegating):
    def plan(self, lengths, layout):
        return super().plan(evolve(lengths, group_ids=np.arange(len(lengths))), layout)


class IgnoresTheBudget(Delegating):
    def plan(self, lengths, layout):
        return super().plan(lengths, evolve(layout, micro_batch_tokens=None))


class IgnoresTheMiniBatchSize(Delegating):
    def plan(self, lengths, layout):
        return super().plan(lengths, evolve(layout, mini_batch_size=None))


class PlansWhatFitsNowhere(Delegating):
    """Plans without bounds where something does not fit into them."""

    def plan(self, lengths, layout):
        try:
            return super().plan(lengths, layout)
        except DataError:
            unbounded = evolve(layout, micro_batch_tokens=None, mini_batch_size=None)
            return evolve(super().plan(lengths, unbounded), layout=layout)


class PlansGroupsOfAnySize(Delegating):
    """Ends a mini-batch after each group that is larger."""

    def plan(self, lengths, layout):
        largest = np.unique(lengths.group_ids, return_counts=True)[1].max(initial=0)
        fits = layout.mini_batch_size is None or largest <= layout.mini_batch_size
        return super().plan(lengths, layout if fits else evolve(layout, mini_batch_size=int(largest)))


class PlansRowsTooNarrow(Delegating):
    """Rows as wide as their responses."""

    def plan(self, lengths, layout):
        return super().plan(evolve(lengths, tokens=lengths.actions), layout)


class PlansDifferentlyEachTime(Delegating):
    calls = 0

    def plan(self, lengths, layout):
        type(self).calls += 1
        return change_ranks(super().plan(lengths, layout), lambda ranks: ranks[:: -1 if self.calls % 2 else 1])


class CarriesSomethingUnheardOf(Delegating):
    carries = frozenset({"vision", "sound"})


class KnowsSixteenSamples(Delegating):
    """Tables of a fixed size: the seventeenth sample is planned as the first."""

    def plan(self, lengths, layout):
        plan = super().plan(lengths, layout)
        return change_ranks(
            plan,
            lambda ranks: tuple(
                tuple(evolve(micro_batch, samples=micro_batch.samples % 16) for micro_batch in rank) for rank in ranks
            ),
        )


class CutsGroupsOfMany(Delegating):
    """Keeps groups together in small batches alone."""

    def plan(self, lengths, layout):
        own = np.arange(len(lengths), dtype=np.int64)
        return super().plan(evolve(lengths, group_ids=own) if len(lengths) > 12 else lengths, layout)


class PlansOtherwiseLater(Delegating):
    """Turns the mini-batches around in every twenty-fifth plan of the process."""

    calls = 0

    def plan(self, lengths, layout):
        type(self).calls += 1
        plan = super().plan(lengths, layout)
        return evolve(plan, mini_batches=plan.mini_batches[::-1]) if self.calls % 25 == 0 else plan


class ReturnsAList(Delegating):
    def plan(self, lengths, layout):
        return list(super().plan(lengths, layout).mini_batches)


class SortsTheLengths(Delegating):
    """Sorts what it was given."""

    def plan(self, lengths, layout):
        plan = super().plan(lengths, layout)
        lengths.actions.sort()
        return plan


class PlansByCount(Delegating):
    """Remembers the plan of so many samples."""

    def __init__(self):
        super().__init__()
        self.plans = {}

    def plan(self, lengths, layout):
        return self.plans.setdefault(len(lengths), super().plan(lengths, layout))


class PlansByLengths(Delegating):
    """Remembers the plan of these lengths, and not which samples belong together."""

    def __init__(self):
        super().__init__()
        self.plans = {}

    def plan(self, lengths, layout):
        return self.plans.setdefault((lengths.tokens.tobytes(), lengths.actions.tobytes()), super().plan(lengths, layout))


class RoundsWidths(Delegating):
    """Odd and right: wider rows than are needed, where no budget forbids it."""

    def plan(self, lengths, layout):
        plan = super().plan(lengths, layout)
        if layout.micro_batch_tokens is not None:
            return plan
        return change_ranks(
            plan,
            lambda ranks: tuple(
                tuple(evolve(micro_batch, width=-(-micro_batch.width // 8) * 8) for micro_batch in rank) for rank in ranks
            ),
        )
