"""First-fit-decreasing bin packing in O(n log n), compiled or in Python, with the same bins as the plain scan in `bins_reference`."""

from bisect import bisect_right
from heapq import heappop, heappush

import numpy as np

from skyrl_engine.contracts import AnyArray, IntArray, Ragged, offsets_of
from skyrl_engine_collators.kernels import kernels


def first_fit_decreasing(sizes: IntArray, capacity: int) -> Ragged:
    """Return bins of items: the largest item first (of equals the higher index), each in the first bin that has room.

    `sizes` int64[n], each between 1 and `capacity`. Bins are in the order they were opened, items in the order they came.
    """
    compiled = kernels()
    if compiled is not None:
        return compiled.first_fit(sizes, capacity)
    order = largest_first(sizes)
    bin_of = _first_fit(sizes[order], capacity)
    return group_by_bin(order, bin_of, bins=int(bin_of.max(initial=-1)) + 1)


def largest_first(sizes: IntArray) -> IntArray:
    """Return int64[n], the items by (size, index), both descending."""
    return stable_order(sizes)[::-1]


def group_by_bin(items: IntArray, bin_of: IntArray, *, bins: int) -> Ragged:
    """Return the items of each bin in the given order; `bin_of` int64[n] is each item's bin."""
    return Ragged(items[stable_order(bin_of)], offsets_of(np.bincount(bin_of, minlength=bins)))


def stable_order(keys: IntArray) -> IntArray:
    """Return a stable ascending order of non-negative keys; NumPy uses a faster radix sort if 16 bits hold them."""
    narrow: AnyArray = keys.astype(np.uint16) if keys.max(initial=0) < 2**16 else keys
    return np.argsort(narrow, kind="stable")


def _first_fit(sizes: IntArray, capacity: int) -> IntArray:
    """Return int64[n], the bin of each item, for sizes in descending order.

    Equal items come together, so the first bin with room takes as many of them as it holds before the next one is asked. `open_bins` is a
    heap of the bins that have room for the current size: its top is the first fit. A bin without room for it waits in the list of the
    largest later size that fits into it. Every step places an item or moves a bin to a list: O(n log n).
    """
    run_starts = np.flatnonzero(np.diff(sizes, prepend=0))
    run_sizes = sizes[run_starts].tolist()
    run_lengths = np.diff(run_starts, append=len(sizes)).tolist()
    ascending = run_sizes[::-1]
    waiting: list[list[int]] = [[] for _ in range(len(run_sizes) + 1)]  # the last: no item is small enough any more
    open_bins: list[int] = []
    rooms: list[int] = []
    takers: list[int] = []
    taken: list[int] = []
    for run, (size, count) in enumerate(zip(run_sizes, run_lengths, strict=True)):
        for number in waiting[run]:
            heappush(open_bins, number)
        left = count
        while left and open_bins:
            number = open_bins[0]
            takes = min(rooms[number] // size, left)
            left -= takes
            room = rooms[number] = rooms[number] - takes * size
            takers.append(number)
            taken.append(takes)
            if room < size:
                heappop(open_bins)
                waiting[len(run_sizes) - bisect_right(ascending, room)].append(number)
        if left:
            per_bin = capacity // size
            full, rest = divmod(left, per_bin)
            room = capacity - per_bin * size
            fresh = range(len(rooms), len(rooms) + full)
            rooms.extend([room] * full)
            takers.extend(fresh)
            taken.extend([per_bin] * full)
            waiting[len(run_sizes) - bisect_right(ascending, room)].extend(fresh)
            if rest:
                takers.append(len(rooms))
                taken.append(rest)
                heappush(open_bins, len(rooms))
                rooms.append(capacity - rest * size)
    return np.repeat(np.asarray(takers, dtype=np.int64), taken)
