"""Packing policies, which put items into bins: an item is a unit of samples, a bin is a row. `bins_reference` is the definition."""

from heapq import heapreplace
from typing import Literal

import numpy as np

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import IntArray, Ragged, offsets_of
from skyrl_engine_collators.packed.first_fit import first_fit_decreasing, group_by_bin, largest_first

Policy = Literal["ffd", "balanced", "concat"]


def bins_of(sizes: IntArray, *, policy: Policy, capacity: int | None, ranks: int, may_be_empty: bool) -> Ragged:
    """Return the items of each bin; the number of bins is a multiple of `ranks`.

    `sizes` int64[n] are at least 1 and at most `capacity`. Without a capacity there is one bin per rank, balanced, whatever the policy.
    Raises UnsupportedError if there are fewer items than bins and no bin `may_be_empty`.
    """
    if capacity is None:
        _check_enough(len(sizes), ranks, may_be_empty=may_be_empty)
        return group_by_bin(*_longest_processing_time(sizes, ranks), bins=ranks)
    opened = fill_in_order(sizes, capacity) if policy == "concat" else first_fit_decreasing(sizes, capacity)
    bins = pad_bins_to_multiple(opened, ranks, may_be_empty=may_be_empty)
    if policy != "balanced":
        return bins
    order, bin_of = _longest_processing_time(sizes, len(bins))
    loads = np.zeros(len(bins), dtype=np.int64)
    np.add.at(loads, bin_of, sizes[order])
    return bins if loads.max() > capacity else group_by_bin(order, bin_of, bins=len(bins))


def fill_in_order(sizes: IntArray, capacity: int) -> Ragged:
    """Return bins of consecutive items: each goes into the last bin if there is room, otherwise into a new one."""
    ends = np.cumsum(sizes)
    offsets = [0]
    filled = 0
    while offsets[-1] < len(sizes):
        offsets.append(int(np.searchsorted(ends, filled + capacity, side="right")))
        filled = int(ends[offsets[-1] - 1])
    return Ragged(np.arange(len(sizes), dtype=np.int64), np.asarray(offsets, dtype=np.int64))


def pad_bins_to_multiple(bins: Ragged, ranks: int, *, may_be_empty: bool) -> Ragged:
    """Raise the number of bins to a multiple of `ranks`, at least `ranks`.

    Each new bin takes the last item of a donor. Donors are ordered once by (items, index), both descending; each gives items until it has one
    left. If no donor is left, new bins stay empty if they `may_be_empty`. Raises UnsupportedError otherwise.
    """
    target = max(-(-len(bins) // ranks), 1) * ranks
    _check_enough(len(bins.values), target, may_be_empty=may_be_empty)
    missing = target - len(bins)
    if not missing:
        return bins
    counts = bins.lengths
    moved_places: list[int] = []  # places in bins.values
    for donor in np.argsort(counts, kind="stable")[::-1].tolist():
        spare = min(int(counts[donor]) - 1, missing - len(moved_places))
        if spare <= 0:
            break
        moved_places.extend(range(int(bins.offsets[donor + 1]) - 1, int(bins.offsets[donor + 1]) - 1 - spare, -1))
        counts[donor] -= spare
    remaining = np.delete(bins.values, moved_places)
    added = np.zeros(missing, dtype=np.int64)
    added[: len(moved_places)] = 1
    return Ragged(np.concatenate((remaining, bins.values[moved_places])), offsets_of(np.concatenate((counts, added))))


def _check_enough(items: int, bins: int, *, may_be_empty: bool) -> None:
    if items < bins and not may_be_empty:
        samples = "1 sample (or unit of samples)" if items == 1 else f"{items} samples (or units of samples)"
        raise UnsupportedError(
            f"{samples} cannot fill {bins} packed rows, so that every rank has equally many",
            remedy="Set the collator's strict_capacity = true, which fills up with empty rows, or give a mini-batch more samples",
        )


def _longest_processing_time(sizes: IntArray, bins: int) -> tuple[IntArray, IntArray]:
    """Return the items, largest first, and the bin of each: the least loaded so far (Graham 1969), among equals the lowest."""
    order = largest_first(sizes)
    heap = [(0, number) for number in range(bins)]
    bin_of = np.empty(len(sizes), dtype=np.int64)
    for place, size in enumerate(sizes[order].tolist()):
        load, number = heap[0]
        bin_of[place] = number
        heapreplace(heap, (load + size, number))
    return order, bin_of
