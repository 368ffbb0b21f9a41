"""Planning packed rows: mini-batches, then rows of whole units, row k to rank k mod dp."""

import numpy as np
from attrs import frozen

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import (
    BatchPlan,
    Bundles,
    IntArray,
    Layout,
    MicroBatchPlan,
    MiniBatchPlan,
    Ragged,
    SampleLengths,
    offsets_of,
)
from skyrl_engine_collators.packed.policies import Policy, bins_of
from skyrl_engine_collators.planning.alignment import alignment_of, round_up
from skyrl_engine_collators.planning.mini_batches import mini_batches


@frozen
class Packing:
    """The rules by which rows are filled: `capacity` in tokens counts aligned lengths if `strict`, true lengths otherwise."""

    policy: Policy
    capacity: int | None
    strict: bool


def plan_packed(lengths: SampleLengths, layout: Layout, packing: Packing) -> BatchPlan:
    """Cut the batch as `layout` says, one row per micro-batch; see the Collator contract.

    Raises DataError for a group, unit or sample that fits nowhere, UnsupportedError for a layout that counts rows.
    """
    if layout.micro_batch_rows is not None:
        raise UnsupportedError(
            "packed rows are filled by tokens and a micro-batch is one row, so micro_batch_rows says nothing",
            remedy="Set micro_batch_tokens, the tokens of a row, instead of micro_batch_rows",
        )
    alignment = alignment_of(layout)
    occupied = round_up(lengths.tokens, alignment)
    counted = occupied if packing.strict else lengths.tokens
    cut = []
    for samples in mini_batches(lengths, layout.mini_batch_size):
        units = Bundles.by_label(samples, lengths.unit_ids[samples])
        rows = _rows(units, counted, lengths, alignment, layout.dp, packing)
        cut.append(_mini_batch(rows, _widths(rows, occupied, alignment).tolist(), alignment, layout.dp))
    return BatchPlan(tuple(cut), layout, lengths.sample_ids)


def _rows(units: Bundles, counted: IntArray, lengths: SampleLengths, alignment: int, ranks: int, packing: Packing) -> Ragged:
    """Return the samples of each row, with whole units in the policy's order."""
    sizes = units.sums(counted)
    if packing.capacity is not None:
        _check_capacity(units, sizes, lengths, alignment, packing.capacity)
    bins = bins_of(sizes, policy=packing.policy, capacity=packing.capacity, ranks=ranks, may_be_empty=packing.strict)
    if units.single:  # the usual case
        return Ragged(units.members.values[bins.values], bins.offsets)
    members = units.members.take(bins.values)
    return Ragged(members.values, members.offsets[bins.offsets])


def _check_capacity(units: Bundles, sizes: IntArray, lengths: SampleLengths, alignment: int, capacity: int) -> None:
    over = sizes > capacity
    if not over.any():
        return
    unit = int(np.argmax(over))
    samples = units.members[unit]
    ids = lengths.sample_ids[samples]
    tokens = int(lengths.tokens[samples].sum())
    aligned = f" ({tokens} rounded up for the alignment of {alignment})" if int(sizes[unit]) != tokens else ""
    subject = (
        f"sample {int(ids[0])} takes"
        if len(ids) == 1
        else f"samples {ids[:5].tolist()} of unit {int(lengths.unit_ids[samples[0]])} take"
    )
    raise DataError(
        f"{subject} {int(sizes[unit])} tokens{aligned} where a packed row holds {capacity}",
        remedy=f"Raise micro_batch_tokens and the collator's own limit to at least {int(sizes.max())}, or shorten the samples",
    )


def _widths(rows: Ragged, occupied: IntArray, alignment: int) -> IntArray:
    """Return int64[rows], the tokens that the samples of each row occupy; an empty row is as narrow as the alignment allows."""
    ends = offsets_of(occupied[rows.values])[rows.offsets]
    return np.maximum(np.diff(ends), alignment)


def _mini_batch(rows: Ragged, widths: list[int], alignment: int, ranks: int) -> MiniBatchPlan:
    offsets = np.zeros((len(rows), 2), dtype=np.int64)  # of the one row in each micro-batch
    offsets[:, 1] = rows.lengths
    micro_batches = [
        MicroBatchPlan(samples, row_offsets, width, width - 1, alignment)
        for samples, row_offsets, width in zip(rows, offsets, widths, strict=True)
    ]
    return MiniBatchPlan(tuple(tuple(micro_batches[rank::ranks]) for rank in range(ranks)))
