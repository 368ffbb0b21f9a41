"""The tokens of a shard that a pass scores, for several of its micro-batches at a time: all that is known of them before rows are built."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Literal

import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.pairs import roles_in
from skyrl_engine.contracts.values.ragged import IntArray, Ragged, offsets_of
from skyrl_engine.contracts.values.source_names import SOURCE
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


def iterate_scored_tokens(
    shard: Shard, first: int, last: int | None, selection: Selection, labels: str | None = None
) -> Iterator[ScoredTokens]:
    """Yield the tokens of each micro-batch from `first` up to `last` (None: all that follow).

    They are slices of arrays that are computed for a window of micro-batches at once. `labels` names a column of token ids [A, 1] that are
    scored in the place of the samples' own.
    """
    samples_of_batch = offsets_of([len(batch.samples) for batch in shard.micro_batches])[first : None if last is None else last + 1]
    actions_of_batch = shard.columns.action_offsets[samples_of_batch]
    begin, count = 0, len(samples_of_batch) - 1
    while begin < count:
        end = int(np.searchsorted(actions_of_batch, actions_of_batch[begin] + WINDOW, side="right")) - 1
        end = min(max(end, begin + 1), count)
        yield from _of_window(shard, samples_of_batch[begin : end + 1], selection, labels)
        begin = end


def _of_window(shard: Shard, samples_of_batch: IntArray, selection: Selection, labels_column: str | None) -> Iterator[ScoredTokens]:
    """Compute on the window's own axes: S samples, A response tokens, E of them with a predecessor, n of them scored.

    A name `x_of_y` is int64[Y + 1]: where the x of each y begin in the window, and where the last one's end; `samples_of_batch` counts in the
    shard instead.
    """
    columns = shard.columns
    samples_of_shard = slice(int(samples_of_batch[0]), int(samples_of_batch[-1]))
    bounds = slice(samples_of_shard.start, samples_of_shard.stop + 1)
    token_offsets, action_offsets = columns.token_offsets[bounds], columns.action_offsets[bounds]
    samples_of_batch = samples_of_batch - samples_of_shard.start
    actions_of_sample = action_offsets - action_offsets[0]
    actions_of_batch = actions_of_sample[samples_of_batch]
    counts = action_offsets[1:] - action_offsets[:-1]
    responses = token_offsets[1:] - counts  # where each begins among the shard's tokens

    unpredicted = (counts > 0) & (responses == token_offsets[:-1])  # nothing predicts a sample's first token
    predicted = np.ones(actions_of_sample[-1], dtype=np.bool_)
    predicted[actions_of_sample[:-1][unpredicted]] = False
    entries = np.flatnonzero(predicted)
    chosen, carrying = predicted, columns.loss_weight[action_offsets[0] : action_offsets[-1]] != 0
    assert not (carrying & ~predicted).any(), "SampleColumns.create clears the weight of first tokens"
    if selection == "loss":
        chosen = carrying
    scored, kept = np.flatnonzero(chosen), np.flatnonzero(chosen[predicted])
    entries_of_batch = np.searchsorted(entries, actions_of_batch)
    scored_of_sample = np.searchsorted(scored, actions_of_sample)
    scored_of_batch = scored_of_sample[samples_of_batch]

    lengths = scored_of_sample[1:] - scored_of_sample[:-1]
    in_shard = scored + action_offsets[0]
    if labels_column is None:
        labels = columns.input_ids[scored + np.repeat(responses - actions_of_sample[:-1], lengths)].astype(np.int64, copy=False)
    else:
        labels = columns.columns[labels_column][in_shard, 0].astype(np.int64, copy=False)
    values = {name: values_of_column[in_shard] for name, values_of_column in columns.columns.items()}
    candidates = {name: column_values.astype(np.int64) for name, column_values in values.items() if column_values.dtype.kind == "i"}
    loss_tokens = None if selection == "loss" or carrying[chosen].all() else carrying[chosen]
    weights = shard.weights_of(
        in_shard, np.repeat(np.arange(samples_of_shard.start, samples_of_shard.stop, dtype=np.int64), lengths)
    )
    place = (scored - np.repeat(actions_of_sample[:-1], lengths)).astype(np.int32)
    kept -= np.repeat(entries_of_batch[:-1], np.diff(scored_of_batch))
    entries -= np.repeat(actions_of_batch[:-1], np.diff(entries_of_batch))
    roles = roles_in(columns.sample_values)
    roles = None if roles is None else roles[samples_of_shard].copy()
    sources = columns.sample_values.get(SOURCE)
    sources = None if sources is None else sources[samples_of_shard].copy()
    sample_ids, group_ids, unit_ids = (
        ids[samples_of_shard].copy() for ids in (columns.sample_ids, columns.group_ids, columns.unit_ids)
    )

    parts = (pairwise(bounds.tolist()) for bounds in (samples_of_batch, entries_of_batch, scored_of_batch))
    for (sample, samples_end), (entry, entries_end), (first, end) in zip(*parts, strict=True):
        yield ScoredTokens(
            entries[entry:entries_end],
            None if end - first == entries_end - entry else kept[first:end],
            labels[first:end],
            {name: column_values[first:end] for name, column_values in candidates.items()},
            ScoredSamples(
                sample_ids=sample_ids[sample:samples_end],
                group_ids=group_ids[sample:samples_end],
                unit_ids=unit_ids[sample:samples_end],
                action_lengths=counts[sample:samples_end],
                scored=Ragged(place[first:end], scored_of_sample[sample : samples_end + 1] - first),
                columns={name: column_values[first:end] for name, column_values in values.items()},
                weights=weights[first:end],
                roles=None if roles is None else roles[sample:samples_end],
                sources=None if sources is None else sources[sample:samples_end],
                carrying=None if loss_tokens is None else loss_tokens[first:end],
            ),
        )
