"""The tokens of a shard that a pass scores, for several of its micro-batches at a time: all that is known of them before rows are built."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.plan import MicroBatchPlan
from skyrl_engine.contracts.values.ragged import IntArray, Ragged, offsets_of, segment_indices
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.workers.dispatch import Shard

Selection = Literal["loss", "actions"]
"""Tokens that a pass scores: those that carry loss, or all of every response."""

WINDOW = 1 << 16
"""Response tokens of a window, more only where one micro-batch has more: some megabytes, which stay in a processor's cache."""


@frozen(eq=False)
class ScoredTokens:
    """The n tokens of a micro-batch that are scored, in sample order, among the E response tokens that have a predecessor.

    `entries` int64[E] are the places of the E tokens on the micro-batch's action axis: `GatherIndex.actions` of these rows, sorted. `kept`
    int64[n] are the places of the n among the E, None where they are all. `labels` int64[n] are their token ids, `candidates` int64[n, k] the
    columns that hold token ids.
    """

    entries: IntArray
    kept: IntArray | None
    labels: IntArray
    candidates: Mapping[str, IntArray]
    samples: ScoredSamples


def scored_tokens(shard: Shard, micro_batches: Sequence[MicroBatchPlan], selection: Selection) -> Iterator[ScoredTokens]:
    """Yield the tokens of each micro-batch: slices of arrays that are computed for a window of micro-batches at once."""
    for window in _windows(shard, micro_batches):
        yield from _of_window(shard, window, selection)


def _windows(shard: Shard, micro_batches: Sequence[MicroBatchPlan]) -> Iterator[Sequence[MicroBatchPlan]]:
    lengths = np.diff(shard.columns.action_offsets)
    actions = offsets_of([lengths[each.samples].sum() for each in micro_batches])
    first = 0
    while first < len(micro_batches):
        last = max(first + 1, int(np.searchsorted(actions, actions[first] + WINDOW, side="right")) - 1)
        yield micro_batches[first:last]
        first = last


def _of_window(shard: Shard, window: Sequence[MicroBatchPlan], selection: Selection) -> Iterator[ScoredTokens]:
    """Compute on the window's own axes: M micro-batches, S samples, A response tokens, E of them with a predecessor, n of them scored.

    A name `x_of_y` is int64[Y + 1]: where the x of each y begin, and where the last one's end.
    """
    columns = shard.columns
    samples = np.concatenate([each.samples for each in window])
    actions_in_shard = columns.action_offsets[samples]
    counts = columns.action_offsets[samples + 1] - actions_in_shard
    responses = columns.token_offsets[samples + 1] - counts  # where each begins among the shard's tokens

    samples_of_batch = offsets_of([len(each.samples) for each in window])
    actions_of_sample = offsets_of(counts)
    actions_of_batch = actions_of_sample[samples_of_batch]

    unpredicted = (counts > 0) & (responses == columns.token_offsets[samples])  # nothing predicts a sample's first token
    assert not columns.loss_weight[actions_in_shard[unpredicted]].any(), "SampleColumns.create clears the weight of first tokens"
    entries = np.delete(np.arange(actions_of_sample[-1], dtype=np.int64), actions_of_sample[:-1][unpredicted])
    weighted = columns.loss_weight[segment_indices(columns.action_offsets, samples)] != 0
    scored = np.flatnonzero(weighted) if selection == "loss" else entries
    entries_of_batch = np.searchsorted(entries, actions_of_batch)
    scored_of_sample = np.searchsorted(scored, actions_of_sample)
    scored_of_batch = scored_of_sample[samples_of_batch]

    lengths = np.diff(scored_of_sample)
    place = scored - np.repeat(actions_of_sample[:-1], lengths)
    in_shard = place + np.repeat(actions_in_shard, lengths)
    labels = columns.input_ids[place + np.repeat(responses, lengths)].astype(np.int64, copy=False)
    values = {name: each[in_shard] for name, each in columns.columns.items()}
    candidates = {name: each.astype(np.int64) for name, each in values.items() if each.dtype.kind == "i"}
    weights = shard.weights_of(in_shard, np.repeat(samples, lengths))
    kept = scored - np.repeat(np.cumsum(unpredicted), lengths) - np.repeat(entries_of_batch[:-1], np.diff(scored_of_batch))
    entries -= np.repeat(actions_of_batch[:-1], np.diff(entries_of_batch))
    place = place.astype(np.int32)
    sample_ids, group_ids, unit_ids = columns.sample_ids[samples], columns.group_ids[samples], columns.unit_ids[samples]

    bounds = (pairwise(each.tolist()) for each in (samples_of_batch, entries_of_batch, scored_of_batch))
    for (sample, samples_end), (entry, entries_end), (first, end) in zip(*bounds, strict=True):
        yield ScoredTokens(
            entries[entry:entries_end],
            None if end - first == entries_end - entry else kept[first:end],
            labels[first:end],
            {name: each[first:end] for name, each in candidates.items()},
            ScoredSamples(
                sample_ids=sample_ids[sample:samples_end],
                group_ids=group_ids[sample:samples_end],
                unit_ids=unit_ids[sample:samples_end],
                action_lengths=counts[sample:samples_end],
                scored=Ragged(place[first:end], scored_of_sample[sample : samples_end + 1] - first),
                columns={name: each[first:end] for name, each in values.items()},
                weights=weights[first:end],
            ),
        )
