"""The definition of the packing policies, one item and one bin at a time. `policies` next to it must give the same bins in the same order."""

from collections.abc import Sequence

from skyrl_engine_collators.packed.policies import Policy

Bins = list[list[int]]


def bins_of(sizes: Sequence[int], *, policy: Policy, capacity: int | None, ranks: int, may_be_empty: bool) -> Bins | None:
    """Return the items of each bin, or None if there are too few items to fill a multiple of `ranks` bins that may not be empty."""
    if capacity is None:
        return None if len(sizes) < ranks and not may_be_empty else fill_least_loaded(sizes, ranks)
    opened = fill_in_order(sizes, capacity) if policy == "concat" else first_fit_decreasing(sizes, capacity)
    bins = pad_bins_to_multiple(opened, ranks)
    if not may_be_empty and [] in bins:
        return None
    if policy == "balanced":
        even = fill_least_loaded(sizes, len(bins))
        if all(sum(sizes[item] for item in members) <= capacity for members in even):
            return even
    return bins


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Return the items by (size, index), both descending."""
    return sorted(range(len(sizes)), key=lambda item: (-sizes[item], -item))


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Put each item into the first bin that has room."""
    bins: Bins = []
    for item in largest_first(sizes):
        for members in bins:
            if sum(sizes[member] for member in members) + sizes[item] <= capacity:
                members.append(item)
                break
        else:
            bins.append([item])
    return bins


def fill_in_order(sizes: Sequence[int], capacity: int) -> Bins:
    """Put each item into the last bin, or into a new one if that has no room."""
    bins: Bins = []
    for item in range(len(sizes)):
        if bins and sum(sizes[member] for member in bins[-1]) + sizes[item] <= capacity:
            bins[-1].append(item)
        else:
            bins.append([item])
    return bins


def fill_least_loaded(sizes: Sequence[int], count: int) -> Bins:
    """Put each item into the least loaded bin, the first among equals."""
    bins: Bins = [[] for _ in range(count)]
    for item in largest_first(sizes):
        min(bins, key=lambda members: sum(sizes[member] for member in members)).append(item)
    return bins


def pad_bins_to_multiple(bins: Bins, ranks: int) -> Bins:
    """Add bins up to a multiple of `ranks`, at least `ranks`, each with the last item of a donor or none."""
    donors = sorted(range(len(bins)), key=lambda number: (len(bins[number]), number), reverse=True)
    raised = [list(members) for members in bins]
    while len(raised) % ranks or not raised:
        while donors and len(raised[donors[0]]) == 1:
            donors.pop(0)
        raised.append([raised[donors[0]].pop()] if donors else [])
    return raised
