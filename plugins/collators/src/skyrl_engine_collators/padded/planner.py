"""Planning padded rows: one sample per row, so a plan is a partition of the samples; `plan_loops.py` next to it is the definition."""

from itertools import islice

import numpy as np

from skyrl_engine.contracts import (
    BatchPlan,
    BuildOrder,
    Bundles,
    IntArray,
    Layout,
    MicroBatchPlan,
    MiniBatchPlan,
    Ragged,
    SampleLengths,
    offsets_of,
)
from skyrl_engine_collators.planning.micro_batches import Limits, check_limits, cuts
from skyrl_engine_collators.planning.mini_batches import mini_batches
from skyrl_engine_collators.planning.ranks import balance, largest_first

NO_SAMPLES = np.zeros(0, dtype=np.int64)
EMPTY_ROW = np.zeros(2, dtype=np.int64)


def plan_padded(lengths: SampleLengths, layout: Layout, *, group_by_length: bool) -> BatchPlan:
    """Cut the batch as `layout` says; see the Collator contract. Raises DataError for a group, unit or sample that fits nowhere.

    With `group_by_length` units of similar length share a micro-batch, longest first, which needs little padding; without, a rank's units
    keep their order.
    """
    limits = Limits(layout.micro_batch_rows, layout.micro_batch_tokens)
    cut = [
        _plan_ranks(samples, lengths, layout.dp, limits, group_by_length)
        for samples in mini_batches(lengths, layout.mini_batch_size)
    ]
    return BatchPlan(tuple(cut), layout, lengths.sample_ids)


def _plan_ranks(samples: IntArray, lengths: SampleLengths, dp: int, limits: Limits, group_by_length: bool) -> MiniBatchPlan:
    """Plan one mini-batch; ranks with fewer micro-batches get empty ones."""
    units = Bundles.by_label(samples, lengths.unit_ids[samples])
    check_limits(units, lengths, limits)
    costs = units.sums(lengths.tokens)
    order = largest_first(costs)
    rank_of = balance(costs, dp, most=_most_units(units, dp, limits), order=order)
    widths = costs if units.single else units.maxima(lengths.tokens)
    if not group_by_length:
        order = np.arange(len(units), dtype=np.int64)
    elif not units.single:
        order = largest_first(widths)
    order = order[np.argsort(rank_of[order].astype(np.min_scalar_type(dp)), kind="stable")]  # few bits, which NumPy sorts in O(n)
    sizes, widths = units.sizes[order], widths[order]
    bounds = offsets_of(np.bincount(rank_of, minlength=dp)).tolist()
    begins = cuts(sizes, widths, bounds, limits)
    orders = [BuildOrder() for _ in begins]
    planned = iter(_rows(_order_units(units, order), begins, orders, lengths))
    count = max(map(len, begins))
    for build_order, rank in zip(orders, begins, strict=True):
        fillers = (MicroBatchPlan(NO_SAMPLES, EMPTY_ROW, 1, 0, 1, build_order, place) for place in range(len(rank), count))
        build_order.micro_batches = (*islice(planned, len(rank)), *fillers)
    return MiniBatchPlan(tuple(build_order.micro_batches for build_order in orders))


def _most_units(units: Bundles, dp: int, limits: Limits) -> int | None:
    """Return the most units a rank may take without a further micro-batch, if rows limit a micro-batch; None otherwise."""
    per_micro_batch = limits.units_per_micro_batch(units)
    if per_micro_batch is None:
        return None
    fair_share = -(-len(units) // dp)
    return -(-fair_share // per_micro_batch) * per_micro_batch


def _order_units(units: Bundles, order: IntArray) -> Bundles:
    if units.single:  # the usual case
        return Bundles(Ragged(units.members.values[order], units.members.offsets))
    return units.take(order)


def _rows(units: Bundles, begins: list[list[int]], orders: list[BuildOrder], lengths: SampleLengths) -> list[MicroBatchPlan]:
    """Plan the micro-batches of all ranks, one after the other, which begin with these units: their samples, ascending, one per row."""
    offsets = units.members.offsets[[*(begin for rank in begins for begin in rank), len(units)]]
    counts = np.diff(offsets)
    # One sort for all of them: by the number of the micro-batch, then by that of the sample.
    numbers = np.repeat(np.arange(len(counts), dtype=np.int64), counts) * len(lengths)
    samples = np.sort(numbers + units.members.values) - numbers
    row_offsets = {count: np.arange(count + 1, dtype=np.int64) for count in set(counts.tolist())}
    return [
        MicroBatchPlan(samples[first:last], row_offsets[last - first], width, action_width, 1, order, place)
        for first, last, width, action_width, (order, place) in zip(
            offsets[:-1].tolist(),
            offsets[1:].tolist(),
            np.maximum.reduceat(lengths.tokens[samples], offsets[:-1]).tolist(),
            np.maximum.reduceat(lengths.actions[samples], offsets[:-1]).tolist(),
            ((order, place) for order, rank in zip(orders, begins, strict=True) for place in range(len(rank))),
            strict=True,
        )
    ]
