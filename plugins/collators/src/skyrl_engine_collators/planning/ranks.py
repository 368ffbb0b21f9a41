"""Spread work over data-parallel ranks: longest processing time first."""

import heapq

import numpy as np

from skyrl_engine.contracts import IntArray


def balance(costs: IntArray, ranks: int, *, most: int | None = None) -> IntArray:
    """Return int64[n], the rank of each item, such that ranks have similar sums of `costs`; O(n log n), deterministic.

    The most expensive item goes first, to the rank with the least so far (Graham 1969: at most 4/3 of the best possible maximum); among
    equals the earlier item and the lower rank come first. No rank takes more than `most` items; there must be room for all.
    """
    if ranks == 1:
        return np.zeros(len(costs), dtype=np.int64)
    assert most is None or most * ranks >= len(costs), "more items than the ranks may take"
    chosen = np.zeros(len(costs), dtype=np.int64)
    heap = [(0, rank, 0) for rank in range(ranks)]
    order = np.argsort(-costs, kind="stable")
    for item, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        load, rank, count = heap[0]
        chosen[item] = rank
        if count + 1 == most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + cost, rank, count + 1))
    return chosen
