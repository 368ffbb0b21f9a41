"""From a plan to what each data-parallel rank is sent: its own samples as columns, its micro-batches, its tokens' weights."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from skyrl_engine.contracts.collator import Collator
from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.merger import Merger
from skyrl_engine.contracts.outputs import BatchOutput, RankOutput
from skyrl_engine.contracts.plan import BatchPlan, Layout, MicroBatchPlan, MiniBatchPlan
from skyrl_engine.contracts.ragged import offsets_of, segment_indices
from skyrl_engine.contracts.reducer import BatchStructure, Reducer
from skyrl_engine.errors import ContractError
from skyrl_engine.registry.host import Owner, blaming


@frozen(eq=False)
class Shard:
    """All that one data-parallel rank needs for one mini-batch; its tensor, pipeline and context ranks share it.

    `micro_batches` number samples within `columns`; `token_weights` float64 lie on the columns' action axis.
    """

    columns: SampleColumns
    micro_batches: tuple[MicroBatchPlan, ...]
    token_weights: npt.NDArray[np.float64]


def planned(label: str, collator: Collator, columns: SampleColumns, layout: Layout) -> BatchPlan:
    """The collator's plan of one mini-batch, checked: nothing a plan forgets can be missed later, since outputs are compared with it.

    Raises ContractError, naming the collator `label`.
    """
    with blaming(Owner(label, "Correct it, or choose another collator"), "plan"):
        plan = collator.plan(columns.lengths, layout)
    _check_type(label, plan, BatchPlan)
    if len(plan.mini_batches) != 1:
        raise ContractError(
            f"{label} planned {len(plan.mini_batches)} mini-batches where one was asked for",
            remedy="Cut mini-batches only as layout.mini_batch_size says",
        )
    (mini_batch,) = plan.mini_batches
    counts = [len(rank) for rank in mini_batch.ranks]
    if len(counts) != layout.dp or len(set(counts)) != 1:
        raise ContractError(
            f"{label} planned {counts} micro-batches for {layout.dp} ranks",
            remedy="Give every rank equally many; fill up with micro-batches of one empty row",
        )
    everything = np.arange(len(columns), dtype=np.int64)
    if not np.array_equal(np.sort(mini_batch.samples), everything):
        missing = np.setdiff1d(everything, mini_batch.samples)
        raise ContractError(
            f"{label} planned {len(mini_batch.samples)} samples where there are {len(columns)}, {len(missing)} of them not at all",
            remedy="Plan every sample exactly once",
            details=[f"not planned: sample {int(columns.sample_ids[sample])}" for sample in missing[:5]],
        )
    return plan


def batch_structure(columns: SampleColumns, mini_batch: MiniBatchPlan, max_sequence_length: int | None) -> BatchStructure:
    """What a reducer sees of a mini-batch: its samples in rank-major, micro-batch order."""
    samples = mini_batch.samples
    sizes = [len(micro_batch.samples) for rank in mini_batch.ranks for micro_batch in rank]
    return BatchStructure(
        loss_weight=columns.loss_weight[segment_indices(columns.action_offsets, samples)],
        action_offsets=offsets_of(np.diff(columns.action_offsets)[samples]),
        group_ids=columns.group_ids[samples],
        unit_ids=columns.unit_ids[samples],
        micro_batch=np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
        max_sequence_length=max_sequence_length,
        sample_ids=columns.sample_ids[samples],
    )


def token_weights(label: str, reducer: Reducer, structure: BatchStructure) -> npt.NDArray[np.float64]:
    """The reducer's weights, float64[A]; raises ContractError, naming it `label`, where they are not one finite number per action token."""
    with blaming(Owner(label, "Correct it, or choose another reducer"), "weights"):
        weights = reducer.weights(structure)
    count = len(structure.loss_weight)
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float64 or weights.shape != (count,):
        got = f"{weights.dtype}{list(weights.shape)}" if isinstance(weights, np.ndarray) else type(weights).__name__
        raise ContractError(f"{label} returned {got}, not float64[{count}]", remedy="Return one float64 weight per action token")
    wrong = ~np.isfinite(weights)
    if wrong.any():
        sample = int(structure.sample_ids[structure.sequence_index[np.argmax(wrong)]])
        raise ContractError(
            f"{label} gave a token of sample {sample} the weight {weights[np.argmax(wrong)]}",
            remedy="Guard divisions by counts that can be 0",
        )
    return weights


def merged(label: str, merger: Merger, outputs: Sequence[RankOutput], plan: BatchPlan) -> BatchOutput:
    """The merger's output, checked against the plan. Raises ContractError, naming the merger `label`; OutputError passes."""
    with blaming(Owner(label, "Correct it, or choose another merger"), "merge"):
        output = merger.merge(outputs, plan)
    _check_type(label, output, BatchOutput)
    if not np.array_equal(output.sample_ids, plan.expected_ids):
        raise ContractError(
            f"{label} returned {len(output.sample_ids)} samples where {len(plan.expected_ids)} were planned, or in another order",
            remedy="Return every planned sample exactly once, in the plan's order",
        )
    if lost := {name for each in outputs for name in each.metrics} - output.metrics.keys():
        raise ContractError(f"{label} returned no metric {min(lost)!r}", remedy="Return every metric that a rank reports")
    return output


def _check_type(label: str, returned: object, wanted: type) -> None:
    if not isinstance(returned, wanted):
        raise ContractError(f"{label} returned {type(returned).__name__}", remedy=f"Return a {wanted.__name__}")


def cut(
    columns: SampleColumns,
    mini_batch: MiniBatchPlan,
    weights: npt.NDArray[np.float64],
    needs: Iterable[str],
) -> list[Shard]:
    """One shard per data-parallel rank. `weights` float64[A] as `token_weights` gave them; of the columns only `needs` travel."""
    wanted = set(needs)
    source = evolve(columns, columns={name: values for name, values in columns.columns.items() if name in wanted})
    shards = []
    start = 0
    for rank, micro_batches in enumerate(mini_batch.ranks):
        own = source.take(mini_batch.rank_samples(rank))
        numbers = offsets_of([len(micro_batch.samples) for micro_batch in micro_batches])
        local = tuple(
            micro_batch.renumbered(np.arange(first, last, dtype=np.int64))
            for micro_batch, first, last in zip(micro_batches, numbers[:-1], numbers[1:], strict=True)
        )
        stop = start + int(own.action_offsets[-1])
        shards.append(Shard(own, local, weights[start:stop]))
        start = stop
    assert start == len(weights), "the weights do not cover the mini-batch's action tokens"
    return shards
