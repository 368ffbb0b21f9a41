"""Reducer: per-token weights from counts, computed on the controller once per mini-batch, where the global counts are known."""

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, frozen

from skyrl_engine.contracts.values.ragged import BLOCK, AnyArray, IntArray, blocks
from skyrl_engine.errors import DataError

EmptySequence = Literal["count", "skip"]


@frozen(eq=False)
class BatchStructure:
    """The counts of one mini-batch of n sequences with A action tokens, all ranks together.

    `loss_weight` uint8 or float32 [A] with `action_offsets` int64[n+1]; `group_ids`, `unit_ids` int64[n]; `micro_batch` int64[n]
    numbers each sequence's micro-batch over all ranks (sequences of one micro-batch share the number); `max_sequence_length` in
    tokens, if set; `sample_ids` int64[n], by which errors name a sequence (0..n-1 where the caller has none). `grouped` says whether the
    data has group ids; without them `group_ids` makes every sequence a group of its own. `trajectory_ids` int64[n] name the attempt that a
    sequence is a stretch of; each is its own where nobody says. `columns` [A] or [A, k] and `sample_values` [n], by name, are those that the
    reducer needs. `mean_mass` is the sum of the loss weights of the whole batch over the number of its mini-batches, each of which is an
    optimizer step; None where this mini-batch is the batch.
    """

    loss_weight: AnyArray
    action_offsets: IntArray
    group_ids: IntArray
    unit_ids: IntArray
    micro_batch: IntArray
    max_sequence_length: int | None = None
    sample_ids: IntArray = Factory(lambda structure: np.arange(len(structure), dtype=np.int64), takes_self=True)
    grouped: bool = True
    trajectory_ids: IntArray = Factory(lambda structure: np.arange(len(structure), dtype=np.int64), takes_self=True)
    columns: Mapping[str, AnyArray] = Factory(dict)
    sample_values: Mapping[str, AnyArray] = Factory(dict)
    mean_mass: float | None = None

    def __len__(self) -> int:
        return len(self.action_offsets) - 1

    @property
    def sequence_index(self) -> IntArray:
        """int64[A]: the sequence of every action token."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.action_offsets))

    @property
    def mass(self) -> npt.NDArray[np.float64]:
        """float64[n]: the sum of each sequence's loss weights (the token count when weights are 0 and 1)."""
        return self._per_sequence(self.loss_weight)

    @property
    def empty(self) -> npt.NDArray[np.bool_]:
        """bool[n]: sequences in which every loss weight is 0."""
        carrying = self._per_sequence(self.loss_weight != 0)
        return np.equal(carrying, 0)

    def _per_sequence(self, values: AnyArray) -> npt.NDArray[np.float64]:
        if values.dtype == np.float32:  # one after the other: rounding must not depend on where in the batch a sequence is
            return np.bincount(self.sequence_index, weights=values, minlength=len(self)).astype(np.float64)
        sums = np.zeros(len(self), dtype=np.float64)
        filled = np.flatnonzero(np.diff(self.action_offsets))
        begins = self.action_offsets[np.append(filled, len(self))]
        for first, last in blocks(begins, BLOCK):  # NumPy casts all that it adds: no more at a time than the cache holds
            shard_values = values[begins[first] : begins[last]]
            sums[filled[first:last]] = np.add.reduceat(
                shard_values, begins[first:last] - begins[first], dtype=np.uint32
            )  # exact: 0 and 1
        return sums


@frozen(eq=False)
class PerSequence:
    """Weights in short, where they are of this form: token t of sequence i weighs loss_weight[t] / divisor[i]; `divisor` float64[n].

    A few numbers per sequence instead of one per token: what travels to the ranks where a reducer offers it.
    """

    divisor: npt.NDArray[np.float64]

    def expand(self, structure: BatchStructure) -> npt.NDArray[np.float64]:
        """float64[A]: one weight per action token."""
        return structure.loss_weight / self.divisor[structure.sequence_index]


TokenWeights = npt.NDArray[np.float64] | PerSequence
"""One float64 weight per action token, or the short form."""


class Reducer(Protocol):
    """The product of `skyrl_engine_make_reducer`.

    `empty_sequence` says whether sequences without loss are counted in means over sequences. `batch_local` says that the weights depend
    on how the mini-batch is cut into micro-batches, by nature; of all others they must not.

    A reducer whose weight of a token depends on that token alone may say so in one more attribute, `additive`: gradients of several
    mini-batches may then be added up before a step. One that gives some tokens with loss the weight 0 by intention says so in `selective`;
    the conformance kit takes it for a fault otherwise. One that reads columns of the data or values of samples names them in the attribute
    `needs` (`contracts.kinds.needs`): it finds them in the structure.
    """

    empty_sequence: EmptySequence
    batch_local: bool

    def weights(self, structure: BatchStructure) -> npt.NDArray[np.float64]:
        """float64[A]: the weight of every action token's term; the objective is the plain sum of weight times term."""


@define
class FunctionReducer:
    """A reducer made of a plain function and its config; the product of the `reducer` decorator."""

    name: str
    function: Callable[..., TokenWeights]
    config: object
    empty_sequence: EmptySequence = "count"
    negative_weights: bool = False
    batch_local: bool = False
    additive: bool = False
    selective: bool = False
    needs: tuple[str, ...] = ()

    def weights(self, structure: BatchStructure) -> npt.NDArray[np.float64]:
        """The function's weights. Raises DataError for a negative loss weight, unless the reducer takes them."""
        compacted = self.compact(structure)
        return compacted.expand(structure) if isinstance(compacted, PerSequence) else compacted

    def compact(self, structure: BatchStructure) -> TokenWeights:
        """Return `weights`, in short where the function gave them so."""
        if not self.negative_weights:
            _refuse_negative(self.name, structure)
        return self.function(structure, self.config)


def _refuse_negative(name: str, structure: BatchStructure) -> None:
    if structure.loss_weight.dtype == np.uint8:  # never below 0, so not looked at
        return
    negative = structure.loss_weight < 0
    if not negative.any():
        return
    place = int(np.argmax(negative))
    sequence = int(np.searchsorted(structure.action_offsets, place, side="right")) - 1
    raise DataError(
        f"sample {int(structure.sample_ids[sequence])} has the loss weight {structure.loss_weight[place]} at response token "
        f"{place - int(structure.action_offsets[sequence])}, and the reducer {name!r} divides by sums of weights",
        remedy="Use the reducer 'sum' for negative weights, or make them 0 or more",
    )
