"""Merger: one output out of many ranks' outputs."""

from collections.abc import Sequence
from typing import Protocol

from skyrl_engine.contracts.values.outputs import BatchOutput, RankOutput
from skyrl_engine.contracts.values.plan import BatchPlan


class Merger(Protocol):
    """The product of `skyrl_engine_make_merger`."""

    def merge(self, outputs: Sequence[RankOutput], plan: BatchPlan) -> BatchOutput:
        """Keep collection ranks, drop padding samples, restore the plan's sample order, reduce metrics as they declare.

        `outputs` may come from several mini-batches and in any order of ranks, which changes no bit of what is returned: metrics are combined
        in the order of data-parallel ranks, so that a run repeats. Raises OutputError listing ids and ranks when a planned
        sample is missing, or one is duplicated or unexpected.
        """
