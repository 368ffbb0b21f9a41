"""Reducer: per-token weights from counts, computed on the controller once per mini-batch, where the global counts are known."""

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.ragged import AnyArray, IntArray

EmptySequence = Literal["count", "skip"]


@frozen(eq=False)
class BatchStructure:
    """The counts of one mini-batch of n sequences with A action tokens, all ranks together.

    `loss_weight` uint8 or float32 [A] with `action_offsets` int64[n+1]; `group_ids`, `unit_ids` int64[n]; `micro_batch` int64[n] numbers
    each sequence's micro-batch over all ranks (sequences of one micro-batch share the number); `max_sequence_length` in tokens, if set.
    """

    loss_weight: AnyArray
    action_offsets: IntArray
    group_ids: IntArray
    unit_ids: IntArray
    micro_batch: IntArray
    max_sequence_length: int | None = None

    def __len__(self) -> int:
        return len(self.action_offsets) - 1

    @property
    def sequence_index(self) -> IntArray:
        """int64[A]: the sequence of every action token."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.action_offsets))

    @property
    def mass(self) -> npt.NDArray[np.float64]:
        """float64[n]: the sum of each sequence's loss weights (the token count when weights are 0 and 1)."""
        return np.bincount(self.sequence_index, weights=self.loss_weight, minlength=len(self)).astype(np.float64)

    @property
    def empty(self) -> npt.NDArray[np.bool_]:
        """bool[n]: sequences in which every loss weight is 0."""
        carrying = np.bincount(self.sequence_index, weights=self.loss_weight != 0, minlength=len(self))
        return carrying == 0


class Reducer(Protocol):
    """What `skyrl_engine_make_reducer` returns. `empty_sequence` says whether sequences without loss are counted in means over sequences."""

    empty_sequence: EmptySequence

    def weights(self, structure: BatchStructure) -> npt.NDArray[np.float64]:
        """float64[A]: the weight of every action token's term; the objective is the plain sum of weight times term."""
