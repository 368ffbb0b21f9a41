"""Planning padded rows: one sample per row, so a plan is a partition of the samples."""

import numpy as np

from skyrl_engine.contracts import (
    BatchPlan,
    Bundles,
    IntArray,
    Layout,
    MicroBatchPlan,
    MiniBatchPlan,
    SampleLengths,
    one_sample_per_row,
)
from skyrl_engine_collators.planning.micro_batches import Limits, check_limits, micro_batches
from skyrl_engine_collators.planning.mini_batches import mini_batches
from skyrl_engine_collators.planning.ranks import balance


def plan_padded(lengths: SampleLengths, layout: Layout) -> BatchPlan:
    """Cut the batch as `layout` says; see the Collator contract. Raises DataError for a group, unit or sample that fits nowhere."""
    limits = Limits(layout.micro_batch_rows, layout.micro_batch_tokens)
    cut = [_plan_ranks(samples, lengths, layout.dp, limits) for samples in mini_batches(lengths, layout.mini_batch_size)]
    return BatchPlan(
        tuple(MiniBatchPlan(tuple(tuple(_rows(samples, lengths) for samples in rank) for rank in ranks)) for ranks in cut),
        layout,
        lengths.sample_ids,
    )


def _plan_ranks(samples: IntArray, lengths: SampleLengths, dp: int, limits: Limits) -> list[list[IntArray]]:
    """Return the samples by rank and micro-batch; ranks with fewer micro-batches get empty ones."""
    units = Bundles.by_label(samples, lengths.unit_ids[samples])
    check_limits(units, lengths, limits)
    rank_of = balance(units.sums(lengths.tokens), dp, most=_most_units(units, dp, limits))
    ranks = [micro_batches(units.take(np.flatnonzero(rank_of == rank)), lengths, limits) for rank in range(dp)]
    count = max(len(rank) for rank in ranks)
    return [rank + [np.zeros(0, dtype=np.int64)] * (count - len(rank)) for rank in ranks]


def _most_units(units: Bundles, dp: int, limits: Limits) -> int | None:
    """Return the most units a rank may take without a further micro-batch, if rows limit a micro-batch; None otherwise."""
    per_micro_batch = limits.units_per_micro_batch(units)
    if per_micro_batch is None:
        return None
    fair_share = -(-len(units) // dp)
    return -(-fair_share // per_micro_batch) * per_micro_batch


def _rows(samples: IntArray, lengths: SampleLengths) -> MicroBatchPlan:
    """Plan one row per sample, or one row without a sample if there are none."""
    if not len(samples):
        return MicroBatchPlan(samples, np.zeros(2, dtype=np.int64), width=1, action_width=0)
    return one_sample_per_row(samples, int(lengths.tokens[samples].max()), int(lengths.actions[samples].max()))
