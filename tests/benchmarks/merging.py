"""CPU time of merging over that of concatenating the same arrays: 1,024 simulated ranks of 64 samples, in the worst order.

The samples are dealt to the ranks at random, so that every one is read or written out of order, and memory decides. Rounds are interleaved
in one process; the figure is the ratio of the least CPU times. Run with `nox -s bench`.
"""

from collections.abc import Sequence

import numpy as np
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine

from skyrl_engine.contracts.values.outputs import BatchOutput, Metric, RankOutput
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MiniBatchPlan, one_sample_per_row
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.contracts.values.topology import RankCoords
from skyrl_engine_mergers.listed import ListMerger
from skyrl_engine_mergers.ordered import OrderedMerger

RANKS, SAMPLES, ROUNDS = 1024, 64, 7
TOKENS = (0, 16, 256, 1024)
MOST = 5.0
"""Bar: multiple of what concatenating costs."""
MERGERS = {"ordered": OrderedMerger(), "list": ListMerger()}


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


def concatenate(outputs: Sequence[RankOutput]) -> list[np.ndarray]:
    """The same arrays end to end: ids, lengths, places, and each field's values; offsets as lengths, since joined offsets mean nothing."""
    return [
        np.concatenate([output.sample_ids for output in outputs]),
        np.concatenate([output.action_lengths for output in outputs]),
        np.concatenate([output.scored.lengths for output in outputs]),
        np.concatenate([output.scored.values for output in outputs]),
        *(np.concatenate([output.fields[name].values for output in outputs]) for name in outputs[0].fields),
    ]


def costs(merger: OrderedMerger | ListMerger, outputs: Sequence[RankOutput], plan: BatchPlan) -> dict[str, float]:
    """Least CPU seconds of "merging" and "concatenating"."""
    works = {"merging": lambda: merger.merge(outputs, plan), "concatenating": lambda: concatenate(outputs)}
    return interleave(works, ROUNDS)


def main() -> None:
    print(f"{machine()}, NumPy {np.__version__}; {ROUNDS} rounds")
    for tokens in TOKENS:
        outputs, plan, _ = outputs_of(tokens)
        for name, merger in MERGERS.items():
            least = costs(merger, outputs, plan)
            merging, concatenating = least["merging"], least["concatenating"]
            print(
                f"{name}, {tokens} tokens: {merging * 1e3:.0f} ms, concatenating {concatenating * 1e3:.0f} ms, "
                f"{merging / concatenating:.1f} times more {compare_with_bar(merging / concatenating, at_most=MOST)}"
            )


if __name__ == "__main__":
    main()
