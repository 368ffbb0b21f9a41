"""Turn a plan into shards, one per data-parallel rank: its own samples as columns, its micro-batches, its tokens' weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.backend import StepCounts
from skyrl_engine.contracts.kinds.collator import Collator, measure_lengths
from skyrl_engine.contracts.kinds.merger import Merger
from skyrl_engine.contracts.kinds.needs import column_forms, sample_value
from skyrl_engine.contracts.kinds.reducer import BatchStructure, PerSequence, Reducer, TokenWeights
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.extras import PIXEL_VALUES
from skyrl_engine.contracts.values.outputs import BatchOutput, RankOutput, as_batch_output
from skyrl_engine.contracts.values.plan import (
    BatchPlan,
    BuildOrder,
    Layout,
    MicroBatchPlan,
    MiniBatchPlan,
    SampleLengths,
    as_batch_plan,
)
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Join, join_fresh, offsets_of, take_segments
from skyrl_engine.contracts.values.returned import describe_returned
from skyrl_engine.errors import ContractError, DataError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame


@frozen(eq=False)
class Shard:
    """All that one data-parallel rank needs for one mini-batch; its tensor, pipeline and context ranks share it.

    `micro_batches` number samples within `columns`, where they follow each other in the order of the micro-batches; `weights` are on the
    columns' action axis, or are in short per sample. `step` counts the mini-batch on all ranks.
    """

    columns: SampleColumns
    micro_batches: tuple[MicroBatchPlan, ...]
    weights: TokenWeights
    step: StepCounts

    def weights_of(self, actions: IntArray, samples: IntArray) -> npt.NDArray[np.float64]:
        """float64[n]: weights of the tokens at `actions` int64[n] of the action axis, which belong to `samples` int64[n]."""
        if isinstance(self.weights, PerSequence):
            return self.columns.loss_weight[actions] / self.weights.divisor[samples]
        return self.weights[actions]

    def without_pixels(self) -> "Shard":
        """Return the shard as pipeline stages after the first one need it: without pixels, which are large. Itself where it has none."""
        extras = self.columns.extras
        if PIXEL_VALUES not in extras:
            return self
        remaining = {name: view for name, view in extras.items() if name != PIXEL_VALUES}
        return evolve(self, columns=evolve(self.columns, extras=remaining))


@frozen(eq=False)
class PlacedShard:
    """References to one shard: `first` for the first pipeline stage, `later`, which holds no pixels, for the stages after it."""

    first: Any
    later: Any

    def at(self, stage: int) -> Any:
        """The reference for ranks of pipeline stage `stage`."""
        return self.first if stage == 0 else self.later


def plan_batch(collator: BoundPlugin[Collator], columns: SampleColumns, layout: Layout) -> BatchPlan:
    """The collator's plan of a batch, as `plan_lengths` checks it."""
    return plan_lengths(collator, measure_lengths(collator.product, columns), layout)


def plan_lengths(collator: BoundPlugin[Collator], lengths: SampleLengths, layout: Layout) -> BatchPlan:
    """The collator's plan, checked: nothing a plan forgets can be missed later, since outputs are compared with it.

    Raises ContractError, naming the collator.
    """
    label = collator.label
    with blame(collator.owner, "plan"):
        returned = collator.product.plan(lengths, layout)
    plan = as_batch_plan(label, returned)
    if len(plan.mini_batches) != 1 and layout.mini_batch_size is None:
        raise ContractError(
            f"{label} planned {len(plan.mini_batches)} mini-batches where one was asked for",
            remedy="Cut mini-batches only as layout.mini_batch_size says",
        )
    for mini_batch in plan.mini_batches:
        counts = [len(rank) for rank in mini_batch.ranks]
        if len(counts) != layout.dp or len(set(counts)) != 1:
            raise ContractError(
                f"{label} planned {counts} micro-batches for {layout.dp} ranks",
                remedy="Give every rank equally many; fill up with micro-batches of one empty row",
            )
    everything = np.arange(len(lengths), dtype=np.int64)
    samples = np.concatenate([np.zeros(0, dtype=np.int64), *(mini_batch.samples for mini_batch in plan.mini_batches)])
    if not np.array_equal(np.sort(samples), everything):
        missing = np.setdiff1d(everything, samples)
        raise ContractError(
            f"{label} planned {len(samples)} samples where there are {len(lengths)}, {len(missing)} of them not at all",
            remedy="Plan every sample exactly once",
            details=[f"not planned: sample {int(lengths.sample_ids[sample])}" for sample in missing[:5]],
        )
    return plan


def batch_structure(
    columns: SampleColumns,
    mini_batch: MiniBatchPlan,
    max_sequence_length: int | None,
    join: Join = join_fresh,
    reducer: BoundPlugin[Reducer] | None = None,
    mini_batches: int = 1,
) -> BatchStructure:
    """Show a reducer its mini-batch: the samples in rank-major, micro-batch order, and what it needs of them. `join` as in `cut`.

    `mini_batches` counts those that the columns are cut into.

    Raises DataError, naming the reducer, for a column or a value of samples that it needs and the data lacks.
    """
    samples = mini_batch.samples
    needs = () if reducer is None else getattr(reducer.product, "needs", ())
    label = "" if reducer is None else reducer.label
    values = {
        name: _require_column(label, "value", name, columns.sample_values)[samples] for name in map(sample_value, needs) if name
    }
    read = list(column_forms(needs))
    sizes = [len(micro_batch.samples) for rank in mini_batch.ranks for micro_batch in rank]
    sources = [columns.loss_weight, *(_require_column(label, "column", name, columns.columns) for name in read)]
    (loss_weight, *taken), action_offsets = take_segments(sources, columns.action_offsets, samples, join)
    return BatchStructure(
        loss_weight=loss_weight,
        action_offsets=action_offsets,
        group_ids=columns.group_ids[samples],
        unit_ids=columns.unit_ids[samples],
        micro_batch=np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
        max_sequence_length=max_sequence_length,
        sample_ids=columns.sample_ids[samples],
        grouped=columns.grouped,
        trajectory_ids=columns.trajectory_ids[samples],
        columns={name: _round_to_single(values) for name, values in zip(read, taken, strict=True)},
        sample_values=values,
        mean_mass=float(columns.loss_weight.sum(dtype=np.float64)) / mini_batches if mini_batches > 1 else None,
    )


def _round_to_single(values: AnyArray) -> AnyArray:
    """Return a column as ranks and reducers see it: float64 rounded to float32."""
    return values.astype(np.float32) if values.dtype == np.float64 else values


def _require_column(label: str, what: str, name: str, there: Mapping[str, AnyArray]) -> AnyArray:
    if name not in there:
        raise DataError(
            f"{label} needs the {what} {name!r} of the samples, the data has {', '.join(sorted(there)) or 'none'}",
            remedy="Provide it, or choose a reducer that does not need it",
        )
    return there[name]


def token_weights(reducer: BoundPlugin[Reducer], structure: BatchStructure) -> npt.NDArray[np.float64]:
    """The reducer's weights, float64[A]; raises ContractError as `compact_weights` does."""
    weights = compact_weights(reducer, structure)
    return weights.expand(structure) if isinstance(weights, PerSequence) else weights


def compact_weights(reducer: BoundPlugin[Reducer], structure: BatchStructure) -> TokenWeights:
    """The reducer's weights, in short where it offers that (a method `compact`).

    Raises ContractError, naming it, where they are not one finite number per action token.
    """
    label, product = reducer.label, reducer.product
    with blame(reducer.owner, "weights"):
        weights = getattr(product, "compact", product.weights)(structure)
    if isinstance(weights, PerSequence):
        divisor = weights.divisor
        if not isinstance(divisor, np.ndarray) or divisor.dtype != np.float64 or divisor.shape != (len(structure),):
            raise ContractError(
                f"{label} returned divisors {describe_returned(divisor)} for {len(structure)} sequences from weights",
                remedy="Return one float64 divisor per sequence, or one weight per action token",
            )
        if np.isfinite(divisor).all() and divisor.all():
            return weights
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = weights.expand(structure)  # which names the token below
    count = len(structure.loss_weight)
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float64 or weights.shape != (count,):
        raise ContractError(
            f"{label} returned {describe_returned(weights)}, not float64[{count}], from weights",
            remedy="Return one float64 weight per action token",
        )
    wrong = ~np.isfinite(weights)
    if wrong.any():
        sample = int(structure.sample_ids[structure.sequence_index[np.argmax(wrong)]])
        raise ContractError(
            f"{label} gave a token of sample {sample} the weight {weights[np.argmax(wrong)]}",
            remedy="Guard divisions by counts that can be 0",
        )
    return weights


def merge_outputs(merger: BoundPlugin[Merger], outputs: Sequence[RankOutput], plan: BatchPlan) -> BatchOutput:
    """The merger's output, checked against the plan. Raises ContractError, naming the merger; OutputError passes."""
    label = merger.label
    with blame(merger.owner, "merge"):
        returned = merger.product.merge(outputs, plan)
    output = as_batch_output(label, returned)
    if not np.array_equal(output.sample_ids, plan.expected_ids):
        raise ContractError(
            f"{label} returned {len(output.sample_ids)} samples where {len(plan.expected_ids)} were planned, or in another order",
            remedy="Return every planned sample exactly once, in the plan's order",
        )
    if lost := {name for output in outputs for name in output.metrics} - output.metrics.keys():
        raise ContractError(f"{label} returned no metric {min(lost)!r}", remedy="Return every metric that a rank reports")
    return output


def cut(
    columns: SampleColumns,
    mini_batch: MiniBatchPlan,
    weights: TokenWeights,
    needs: Iterable[str],
    join: Join = join_fresh,
) -> Iterator[Shard]:
    """One shard per data-parallel rank, made when it is asked for, so that one that was sent off need not be held together with the next.

    `weights` as `compact_weights` gave them; of the columns only `needs` travel, in the memory that `join` gives.
    """
    lengths = np.diff(columns.action_offsets)[mini_batch.samples]
    covered = (len(weights.divisor), len(lengths)) if isinstance(weights, PerSequence) else (len(weights), int(lengths.sum()))
    assert covered[0] == covered[1], "the weights do not cover the mini-batch's action tokens"
    tokens = np.diff(columns.token_offsets)[mini_batch.samples]
    step = StepCounts(sequences=int(np.count_nonzero(tokens)), tokens=int(tokens.sum()))
    wanted = set(needs)
    source = evolve(
        columns,
        columns={name: _round_to_single(values) for name, values in columns.columns.items() if name in wanted},
        # texts are for reducers, which work on the controller
        sample_values={name: values for name, values in columns.sample_values.items() if values.dtype.kind not in "OU"},
    )
    samples_before, actions_before = 0, 0
    for rank, micro_batches in enumerate(mini_batch.ranks):
        chosen = mini_batch.rank_samples(rank)
        samples = samples_before + len(chosen)
        actions = actions_before + int(lengths[samples_before:samples].sum())
        if isinstance(weights, PerSequence):
            mine: TokenWeights = PerSequence(weights.divisor[samples_before:samples])
        else:
            mine = weights[actions_before:actions]
        yield Shard(source.take(chosen, join), _renumber(micro_batches), mine, step)
        samples_before, actions_before = samples, actions


def _renumber(micro_batches: Sequence[MicroBatchPlan]) -> tuple[MicroBatchPlan, ...]:
    """The same micro-batches over a rank's own samples, which follow each other."""
    numbers = offsets_of([len(micro_batch.samples) for micro_batch in micro_batches])
    return BuildOrder.of(
        micro_batch.renumber(np.arange(first, last, dtype=np.int64))
        for micro_batch, first, last in zip(micro_batches, numbers[:-1], numbers[1:], strict=True)
    )
