"""Merging costs at most five times concatenating the same arrays, for 1,024 simulated ranks of 64 samples."""

from collections.abc import Sequence

import numpy as np
import pytest
from measuring.cpu_time import interleaved

from skyrl_engine.contracts.outputs import BatchOutput, Metric, RankOutput
from skyrl_engine.contracts.plan import BatchPlan, Layout, MiniBatchPlan, one_sample_per_row
from skyrl_engine.contracts.ragged import Ragged, offsets_of
from skyrl_engine.contracts.topology import RankCoords
from skyrl_engine_mergers.listed import ListMerger
from skyrl_engine_mergers.ordered import OrderedMerger

RANKS, SAMPLES, MOST_ROUNDS = 1024, 64, 60


def outputs_of(tokens: int) -> tuple[list[RankOutput], BatchPlan, BatchOutput]:
    """Samples dealt to the ranks at random, of 0 to 2 * `tokens` scored tokens in two fields; and the batch in order."""
    generator = np.random.default_rng(tokens)
    count = RANKS * SAMPLES
    ids = np.arange(count) * 3 + 7
    lengths = generator.integers(0, 2 * tokens + 1, count)
    offsets = offsets_of(lengths)
    scored = Ragged((np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)).astype(np.int32), offsets)
    names = ("logprobs", "token_loss") if tokens else ()
    fields = {name: Ragged(generator.random(offsets[-1], dtype=np.float32), offsets) for name in names}
    columns = RankOutput(ids, lengths, scored, fields)
    dealt = np.split(generator.permutation(count), RANKS)
    outputs = []
    for dp, samples in enumerate(dealt):
        part = columns.take(samples)
        outputs.append(
            RankOutput(
                part.sample_ids, lengths[samples], part.scored, part.fields, {"loss": Metric.sum(1)}, RankCoords(rank=dp, dp=dp)
            )
        )
    micro_batches = tuple((one_sample_per_row(samples, 1, 1),) for samples in dealt)
    plan = BatchPlan((MiniBatchPlan(micro_batches),), Layout(dp=RANKS), ids)
    return outputs, plan, BatchOutput(ids, lengths, scored, fields, {"loss": Metric.sum(RANKS)})


def concatenated(outputs: Sequence[RankOutput]) -> list[np.ndarray]:
    """The same arrays end to end: ids, lengths, places, and each field's values; offsets as lengths, since joined offsets mean nothing."""
    return [
        np.concatenate([output.sample_ids for output in outputs]),
        np.concatenate([output.action_lengths for output in outputs]),
        np.concatenate([output.scored.lengths for output in outputs]),
        np.concatenate([output.scored.values for output in outputs]),
        *(np.concatenate([output.fields[name].values for output in outputs]) for name in outputs[0].fields),
    ]


@pytest.mark.proof
@pytest.mark.parametrize("tokens", [0, 16, 256, 1024])
@pytest.mark.parametrize("merger", [OrderedMerger(), ListMerger()], ids=["ordered", "list"])
def test_merging_costs_at_most_five_times_concatenating(merger: OrderedMerger | ListMerger, tokens: int) -> None:
    """Without per-token outputs, and with short, middle and long samples, in the worst order: at random over the ranks.

    The least of the rounds counts, and they end when the bound is seen: what else a machine does with its memory only ever adds.
    """
    outputs, plan, whole = outputs_of(tokens)
    merged = merger.merge(outputs, plan)
    for name, ragged in whole.fields.items():
        np.testing.assert_array_equal(merged.fields[name].values, ragged.values, strict=True)
    assert merged.sample_ids.tolist() == whole.sample_ids.tolist()
    assert merged.metrics == whole.metrics
    del merged, whole
    least = interleaved(
        {"merging": lambda: merger.merge(outputs, plan), "concatenating": lambda: concatenated(outputs)},
        MOST_ROUNDS,
        enough=lambda least: least["merging"] <= 5 * least["concatenating"],
    )
    merging, concatenating = least["merging"] * 1e3, least["concatenating"] * 1e3
    print(f"{tokens} tokens: {merging:.0f} ms, concatenating {concatenating:.0f} ms: {merging / concatenating:.1f} times")
    assert merging <= 5 * concatenating
