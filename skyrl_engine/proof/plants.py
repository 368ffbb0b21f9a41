"""Mistakes to plant, each one that a training engine has shipped: a proof that cannot fail proves nothing.

A plant changes the weights of the reducer, the coefficients of terms, the rows that ranks build or what the merger returns; everything else
stays the real thing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from skyrl_engine.contracts.kinds.collator import Collator, DenseBatch
from skyrl_engine.contracts.kinds.merger import Merger
from skyrl_engine.contracts.kinds.reducer import BatchStructure, Reducer
from skyrl_engine.contracts.values.outputs import BatchOutput, RankOutput
from skyrl_engine.contracts.values.plan import BatchPlan
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of, segment_indices
from skyrl_engine.workers.messages import Message

if TYPE_CHECKING:
    from skyrl_engine.workers.worker import Worker

Weights = npt.NDArray[np.float64]


@frozen(eq=False)
class Cut:
    """A case's cut of the batch, which wrong weights depend on. Arrays are per sequence of the structure."""

    structure: BatchStructure
    rank: npt.NDArray[np.int64]

    @classmethod
    def of(cls, structure: BatchStructure, plan: BatchPlan) -> "Cut":
        """`structure` is in the order of the plan: ranks one after the other, micro-batches within."""
        ranks = plan.mini_batches[0].ranks
        sizes = [sum(len(micro_batch.samples) for micro_batch in micro_batches) for micro_batches in ranks]
        return cls(structure, np.repeat(np.arange(len(ranks), dtype=np.int64), sizes))

    @property
    def padded_actions(self) -> npt.NDArray[np.float64]:
        """Positions that each sequence takes where its micro-batch pads responses to the longest."""
        actions = np.diff(self.structure.action_offsets).astype(np.float64)
        longest = np.zeros(int(self.structure.micro_batch.max()) + 1)
        np.maximum.at(longest, self.structure.micro_batch, actions)
        padded: Weights = longest[self.structure.micro_batch]
        return padded

    @property
    def facts(self) -> Mapping[str, float]:
        """Numbers of this cut that a wrong factor may turn out to be."""
        mass = self.structure.mass
        micro_batches = float(len(np.unique(self.structure.micro_batch)))
        ranks = float(self.rank.max() + 1)
        facts = {
            "number of micro-batches": micro_batches,
            "number of micro-batches that carry loss": float(len(np.unique(self.structure.micro_batch[~self.structure.empty]))),
            "padded positions per unit of loss weight": float(self.padded_actions.sum() / mass.sum()),
        }
        if ranks == 1:
            return facts
        alone = micro_batches == ranks == len(np.unique(self.rank))  # two numbers that nothing tells apart
        return {
            "number of ranks, each with one micro-batch" if alone else "number of ranks": ranks,
            "micro-batches of a rank": micro_batches / ranks,
            **facts,
            "rank 0's share of the loss weight": float(mass[self.rank == 0].sum() / mass.sum()),
        }

    @property
    def ranks(self) -> int:
        return int(self.rank.max()) + 1

    def micro_batches(self) -> Iterator[tuple[npt.NDArray[np.int64], BatchStructure]]:
        """Every micro-batch as if it were the whole batch: its places on the action axis, and its structure."""
        own = self.structure
        for number in np.unique(own.micro_batch):
            (members,) = np.nonzero(own.micro_batch == number)
            places = segment_indices(own.action_offsets, members)
            yield (
                places,
                evolve(
                    own,
                    loss_weight=own.loss_weight[places],
                    action_offsets=offsets_of(np.diff(own.action_offsets)[members]),
                    group_ids=own.group_ids[members],
                    unit_ids=own.unit_ids[members],
                    micro_batch=np.zeros(len(members), dtype=np.int64),
                    sample_ids=own.sample_ids[members],
                    trajectory_ids=own.trajectory_ids[members],
                    columns={name: values[places] for name, values in own.columns.items()},
                    sample_values={name: values[members] for name, values in own.sample_values.items()},
                ),
            )

    def spread(self, per_sequence: npt.NDArray[np.float64]) -> Weights:
        """A value per sequence on the action axis."""
        return per_sequence[self.structure.sequence_index]


def _unplanted_weights(reducer: Reducer, cut: Cut) -> Weights:
    return reducer.weights(cut.structure)


def _keep_scale(_cut: Cut, _place: str) -> float:
    return 1.0


def _as_they_came(outputs: Sequence[RankOutput]) -> Sequence[RankOutput]:
    return outputs


@frozen
class Plant:
    """One mistake in words; what it makes of the reducer's weights and of the ranks' outputs, what it multiplies the coefficient of a term by,
    given the term's place (`loss.terms[0]`), and what it makes of the rows that a rank builds (None: nothing).
    """

    meaning: str
    weights: Callable[[Reducer, Cut], Weights] = _unplanted_weights
    coefficient: Callable[[Cut, str], float] = _keep_scale
    outputs: Callable[[Sequence[RankOutput]], Sequence[RankOutput]] = _as_they_came
    rows: Callable[[DenseBatch], DenseBatch] | None = None
    needs_terms: bool = False


def _per_micro_batch(reducer: Reducer, cut: Cut) -> Weights:
    weights = np.zeros(len(cut.structure.loss_weight))
    for places, alone in cut.micro_batches():
        weights[places] = reducer.weights(alone)
    return weights


def _over_padding(reducer: Reducer, cut: Cut) -> Weights:
    return _unplanted_weights(reducer, cut) * float(cut.structure.mass.sum() / cut.padded_actions.sum())


def _over_ranks(reducer: Reducer, cut: Cut) -> Weights:
    return _unplanted_weights(reducer, cut) / cut.ranks


def _without_other_ranks(reducer: Reducer, cut: Cut) -> Weights:
    return _unplanted_weights(reducer, cut) * cut.spread((cut.rank == 0).astype(np.float64))


def _truncate_weights(reducer: Reducer, cut: Cut) -> Weights:
    return np.where(cut.structure.loss_weight == np.trunc(cut.structure.loss_weight), _unplanted_weights(reducer, cut), 0.0)


def _per_rank_share(cut: Cut, _place: str) -> float:
    return len(np.unique(cut.structure.micro_batch)) / cut.ranks


def _shift_samples(outputs: Sequence[RankOutput]) -> Sequence[RankOutput]:
    """Every rank's samples one place on, as if they came back in another order than they were sent."""

    def shift(output: RankOutput) -> RankOutput:
        order = np.arange(len(output.sample_ids))
        # samples without a scored token have nothing that could come back elsewhere
        scored = np.flatnonzero(np.diff(output.scored.offsets))
        order[scored] = np.roll(scored, 1)
        fields = {name: _as_lengths(ragged.take(order), output.scored) for name, ragged in output.fields.items()}
        return evolve(output, fields=fields)

    return [shift(output) for output in outputs]


def _chain_segments(batch: DenseBatch) -> DenseBatch:
    """Let every segment of a tree continue the one before it."""
    if batch.tree is None:
        return batch
    parents = [np.arange(-1, len(row) - 1)[: len(row)] for row in batch.tree.parents]
    return evolve(batch, tree=evolve(batch.tree, parents=Ragged.from_list(parents, np.int64)))


def _as_lengths(moved: Ragged, own: Ragged) -> Ragged:
    return Ragged(np.resize(moved.values, len(own.values)), own.offsets)


PLANTS: Mapping[str, Plant] = {
    "per_microbatch_mean": Plant(
        "every micro-batch divides by its own loss weight instead of the mini-batch's", weights=_per_micro_batch
    ),
    "mean_over_padding": Plant("the mean counts padded positions", weights=_over_padding),
    "mean_over_ranks": Plant("gradients are averaged over ranks instead of summed", weights=_over_ranks),
    "dropped_rank": Plant("the gradient of every rank but the first is lost", weights=_without_other_ranks),
    "terms_per_microbatch": Plant(
        "terms are added once per micro-batch instead of weighed like the loss",
        coefficient=_per_rank_share,
        needs_terms=True,
    ),
    "truncated_weights": Plant("fractional loss weights become whole numbers on ranks", weights=_truncate_weights),
    "visible_siblings": Plant("samples that share a prefix see each other behind it", rows=_chain_segments),
    "outputs_out_of_order": Plant("token losses come back under the next sample's id", outputs=_shift_samples),
}


@frozen(eq=False)
class PlannedCollator:
    """A collator that remembers its last plan, for the reducer planted with it."""

    collator: Collator
    plans: list[BatchPlan] = field(factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collator, name)

    def plan(self, *arguments: Any) -> BatchPlan:
        self.plans[:] = [self.collator.plan(*arguments)]
        return self.plans[0]


@frozen(eq=False)
class PlantedRows:
    """A collator whose dense rows are made wrong by a plant."""

    collator: Collator
    change: Callable[[DenseBatch], DenseBatch]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collator, name)

    def build(self, *arguments: Any, **options: Any) -> DenseBatch:
        return self.change(self.collator.build(*arguments, **options))


@frozen
class PlantRows(Message[None]):
    """Make the rows wrong that a rank builds, until it uses other plugins."""

    change: Callable[[DenseBatch], DenseBatch]
    verb = "use"

    def answer(self, rank: "Worker") -> None:
        rank.wrap_collator(lambda collator: PlantedRows(collator, self.change))


@frozen(eq=False)
class PlantedReducer:
    """The reducer's weights, made wrong by a plant."""

    reducer: Reducer
    plant: Plant
    planned: PlannedCollator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def compact(self, structure: BatchStructure) -> Weights:
        return self.weights(structure)

    def weights(self, structure: BatchStructure) -> Weights:
        return self.plant.weights(self.reducer, Cut.of(structure, self.planned.plans[0]))


@frozen(eq=False)
class PlantedMerger:
    """The merger, given what a plant made of the ranks' outputs."""

    merger: Merger
    plant: Plant

    def merge(self, outputs: Sequence[RankOutput], plan: BatchPlan) -> BatchOutput:
        return self.merger.merge(self.plant.outputs(outputs), plan)
