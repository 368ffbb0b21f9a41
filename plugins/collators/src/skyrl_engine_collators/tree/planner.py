"""Planning rows of trees: mini-batches, then pieces of trees that fit into a row, then rows of pieces, row k to rank k mod dp."""

import numpy as np

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import (
    BatchPlan,
    CommonPrefixes,
    IntArray,
    Layout,
    MicroBatchPlan,
    MiniBatchPlan,
    SampleLengths,
    range_minima,
)
from skyrl_engine_collators.packed.policies import bins_of
from skyrl_engine_collators.planning.alignment import alignment_of, round_up
from skyrl_engine_collators.planning.mini_batches import mini_batches
from skyrl_engine_collators.tree.pieces import Forest


def plan_trees(lengths: SampleLengths, layout: Layout, capacity: int | None) -> BatchPlan:
    """Cut the batch as `layout` says, one row per micro-batch; see the Collator contract. `capacity` counts the tokens that a row computes.

    Raises DataError for a group or unit that fits nowhere, UnsupportedError for a layout that counts rows.
    """
    if layout.micro_batch_rows is not None:
        raise UnsupportedError(
            "rows of trees are filled by tokens and a micro-batch is one row, so micro_batch_rows says nothing",
            remedy="Set micro_batch_tokens, the tokens of a row, instead of micro_batch_rows",
        )
    alignment = alignment_of(layout)
    room = None if capacity is None else capacity // alignment * alignment
    prefixes = CommonPrefixes.none(len(lengths)) if lengths.prefixes is None else lengths.prefixes
    place_of = np.empty(len(lengths), dtype=np.int64)
    place_of[prefixes.order] = np.arange(len(lengths), dtype=np.int64)
    cut = []
    for samples in mini_batches(lengths, layout.mini_batch_size):
        places = np.sort(place_of[samples])
        ordered = prefixes.order[places]
        forest = Forest.of(ordered, lengths, range_minima(prefixes.shared, places))
        cut.append(_mini_batch(forest, lengths, alignment, layout.dp, room))
    return BatchPlan(tuple(cut), layout, lengths.sample_ids)


def _mini_batch(forest: Forest, lengths: SampleLengths, alignment: int, ranks: int, room: int | None) -> MiniBatchPlan:
    """Plan one mini-batch; the number of rows is a multiple of the ranks, and rows may be empty."""
    share = -(-forest.size // ranks)
    pieces = forest.cut(share if room is None else min(room, share))
    sizes = np.asarray([forest.size_of(piece) for piece in pieces], dtype=np.int64)
    if room is not None and (sizes > room).any():
        _refuse(forest, pieces[int(np.argmax(sizes > room))], lengths, int(sizes.max()), room)
    bins = bins_of(sizes, policy="ffd", capacity=room, ranks=ranks, may_be_empty=True)
    rows = [np.sort(np.concatenate([pieces[piece] for piece in members])) if len(members) else _NOTHING for members in bins]
    micro_batches = [_row(forest, places, lengths, alignment) for places in rows]
    return MiniBatchPlan(tuple(tuple(micro_batches[rank::ranks]) for rank in range(ranks)))


_NOTHING = np.zeros(0, dtype=np.int64)


def _row(forest: Forest, places: IntArray, lengths: SampleLengths, alignment: int) -> MicroBatchPlan:
    samples, shared = forest.samples[places], forest.shared_among(places)
    computed = int(lengths.tokens[samples].sum() - shared.sum())
    return MicroBatchPlan(
        samples=samples,
        row_offsets=np.asarray([0, len(samples)], dtype=np.int64),
        width=max(round_up(computed, alignment), alignment),
        action_width=int(lengths.actions[samples].sum()),
        alignment=alignment,
        shared=shared,
    )


def _refuse(forest: Forest, places: IntArray, lengths: SampleLengths, largest: int, room: int) -> None:
    samples = forest.samples[places]
    ids = lengths.sample_ids[samples]
    subject = (
        f"sample {int(ids[0])} takes"
        if len(ids) == 1
        else f"samples {ids[:5].tolist()} of unit {int(lengths.unit_ids[samples[0]])} take"
    )
    raise DataError(
        f"{subject} {forest.size_of(places)} tokens where a row holds {room}",
        remedy=f"Raise micro_batch_tokens and the collator's own limit to at least {largest}, or shorten the samples",
    )
