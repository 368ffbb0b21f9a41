"""Spread work over data-parallel ranks: longest processing time first."""

import heapq

import numpy as np

from skyrl_engine.contracts import IntArray
from skyrl_engine_collators.kernels import kernels


def largest_first(values: IntArray) -> IntArray:
    """Return int64[n], the order of values (0 or more) by size, the largest first and among equals the earlier; O(n) where none is large."""
    largest = values.max(initial=0)
    return np.argsort((largest - values).astype(np.min_scalar_type(largest)), kind="stable")  # NumPy sorts few bits by counting


def balance(costs: IntArray, ranks: int, *, most: int | None = None, order: IntArray | None = None) -> IntArray:
    """Return int64[n], the rank of each item, such that ranks have similar sums of `costs`; O(n log n), deterministic.

    The most expensive item goes first, to the rank with the least so far (Graham 1969: at most 4/3 of the best possible maximum); among
    equals the earlier item and the lower rank come first. No rank takes more than `most` items; there must be room for all. `order` is
    `largest_first(costs)`, for callers that have it.
    """
    if ranks == 1:
        return np.zeros(len(costs), dtype=np.int64)
    assert most is None or most * ranks >= len(costs), "more items than the ranks may take"
    if order is None:
        order = largest_first(costs)
    limit = len(costs) if most is None else min(most, len(costs))
    compiled = kernels()
    give = _assign_in_order if compiled is None else compiled.balance
    chosen = np.empty(len(costs), dtype=np.int64)
    chosen[order] = give(costs[order], ranks, limit)
    return chosen


def _assign_in_order(costs: IntArray, ranks: int, most: int) -> IntArray:
    """Give items in this order, each to the rank with the least so far."""
    chosen = []
    heap = [(0, rank, 0) for rank in range(ranks)]
    for cost in costs.tolist():
        load, rank, count = heap[0]
        chosen.append(rank)
        if count + 1 == most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + cost, rank, count + 1))
    return np.asarray(chosen, dtype=np.int64)
