"""The definition of a padded plan, in plain loops over samples: which share a mini-batch, a rank, a micro-batch. For input that fits."""

import math

from skyrl_engine.contracts import Layout, SampleLengths

Samples = list[int]


def plan(lengths: SampleLengths, layout: Layout, *, group_by_length: bool = True) -> list[list[list[Samples]]]:
    """Return the samples, ascending, by mini-batch, rank and micro-batch."""
    return [_ranks(samples, lengths, layout, group_by_length) for samples in _mini_batches(lengths, layout.mini_batch_size)]


def _mini_batches(lengths: SampleLengths, size: int | None) -> list[Samples]:
    """Put sets of samples that stay together into the last mini-batch while it has room, in the order of their first sample."""
    sets: list[Samples] = []
    for sample in range(len(lengths)):
        connected = [members for members in sets if any(_is_inseparable(lengths, sample, member) for member in members)]
        sets = [members for members in sets if members not in connected] + [
            sorted([sample, *(member for members in connected for member in members)])
        ]
    micro_batches: list[Samples] = []
    for members in sorted(sets):
        if not micro_batches or (size is not None and len(micro_batches[-1]) + len(members) > size):
            micro_batches.append([])
        micro_batches[-1] += members
    return [sorted(samples) for samples in micro_batches]


def _is_inseparable(lengths: SampleLengths, first: int, second: int) -> bool:
    return bool(lengths.group_ids[first] == lengths.group_ids[second] or lengths.unit_ids[first] == lengths.unit_ids[second])


def _ranks(samples: Samples, lengths: SampleLengths, layout: Layout, group_by_length: bool) -> list[list[Samples]]:
    """Give units to ranks, those of most tokens first, each to the rank with the fewest tokens that has room; then cut each rank's."""
    units: list[Samples] = []
    for sample in samples:
        own_unit = next((unit for unit in units if lengths.unit_ids[unit[0]] == lengths.unit_ids[sample]), None)
        if own_unit is None:
            units.append([sample])
        else:
            own_unit.append(sample)
    tokens = [sum(int(lengths.tokens[sample]) for sample in unit) for unit in units]
    most = len(units)
    if layout.micro_batch_rows is not None:  # no more than fill the micro-batches that a fair share of the units needs
        per_micro_batch = layout.micro_batch_rows // max(map(len, units))
        most = math.ceil(math.ceil(len(units) / layout.dp) / per_micro_batch) * per_micro_batch
    units_of_rank: list[list[int]] = [[] for _ in range(layout.dp)]
    for unit in sorted(range(len(units)), key=lambda unit: -tokens[unit]):
        open_ranks = [rank for rank in range(layout.dp) if len(units_of_rank[rank]) < most]
        units_of_rank[min(open_ranks, key=lambda rank: sum(tokens[unit_index] for unit_index in units_of_rank[rank]))].append(unit)
    cut = [_micro_batches([units[unit] for unit in sorted(rank)], lengths, layout, group_by_length) for rank in units_of_rank]
    count = max(map(len, cut))
    return [rank + [[]] * (count - len(rank)) for rank in cut]


def _micro_batches(units: list[Samples], lengths: SampleLengths, layout: Layout, group_by_length: bool) -> list[Samples]:
    """Fill micro-batches with one unit after the other, the longest first if units are grouped by length."""

    def width(samples: Samples) -> int:
        return max(1, *(int(lengths.tokens[sample]) for sample in samples))

    if group_by_length:
        units = sorted(units, key=lambda unit: -max(int(lengths.tokens[sample]) for sample in unit))
    rows: list[Samples] = []
    for unit in units:
        candidate = (rows[-1] if rows else []) + unit
        fits = (layout.micro_batch_rows is None or len(candidate) <= layout.micro_batch_rows) and (
            layout.micro_batch_tokens is None or len(candidate) * width(candidate) <= layout.micro_batch_tokens
        )
        if rows and fits:
            rows[-1] = candidate
        else:
            rows.append(unit)
    return [sorted(samples) for samples in rows]
