"""Plans in which samples without a gradient have micro-batches of their own, after those of the others."""

from itertools import chain

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.kinds.collator import Collator
from skyrl_engine.contracts.values.bundles import Bundles
from skyrl_engine.contracts.values.plan import BatchPlan, Layout, MicroBatchPlan, MiniBatchPlan, SampleLengths
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.engine.plan import Shares
from skyrl_engine.engine.zero_gradients import Work
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.workers.dispatch import plan_lengths

Ranks = list[tuple[MicroBatchPlan, ...]]


def set_apart(
    collator: BoundPlugin[Collator], lengths: SampleLengths, cut: BatchPlan, work: IntArray
) -> tuple[BatchPlan, tuple[Shares, ...]]:
    """Cut every mini-batch of `cut` again, each kind of `work` int64[N] on its own; mini-batches hold the samples that they held.

    A mini-batch in which no sample has a gradient keeps its smallest unit among those that have one, so that the optimizer is given zeros and
    takes its step. Raises ContractError, naming the collator.
    """
    layout = evolve(cut.layout, mini_batch_size=None)
    mini_batches, shares = [], []
    for mini_batch in cut.mini_batches:
        chosen = np.sort(mini_batch.samples)
        own = work[chosen]
        if not own.any():
            mini_batches.append(mini_batch)
            shares.append(Shares(len(mini_batch.ranks[0]), 0))
            continue
        if own.all():
            own[_find_smallest_unit(lengths.take(chosen))] = Work.GRADIENT
        parts = [_plan_part(collator, lengths, chosen[own == kind], layout) for kind in Work]
        mini_batches.append(MiniBatchPlan(tuple(tuple(chain(*of_rank)) for of_rank in zip(*parts, strict=True))))
        shares.append(Shares(len(parts[Work.GRADIENT][0]), len(parts[Work.SCORES][0])))
    return BatchPlan(tuple(mini_batches), cut.layout, cut.sample_ids), tuple(shares)


def _plan_part(collator: BoundPlugin[Collator], lengths: SampleLengths, chosen: IntArray, layout: Layout) -> Ranks:
    """Return the micro-batches of every rank over some samples of the batch, as one mini-batch; none over no sample."""
    if not len(chosen):
        return [()] * layout.dp
    (planned,) = plan_lengths(collator, lengths.take(chosen), layout).mini_batches
    return [tuple(micro_batch.renumber(chosen[micro_batch.samples]) for micro_batch in rank) for rank in planned.ranks]


def _find_smallest_unit(lengths: SampleLengths) -> IntArray:
    """Return the samples of the unit with the fewest tokens, the first of several."""
    units = Bundles.by_label(np.arange(len(lengths), dtype=np.int64), lengths.unit_ids)
    samples: IntArray = units.members[int(np.argmin(units.sums(lengths.tokens)))]
    return samples
