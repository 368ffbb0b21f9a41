"""The order in which samples are trained on: a pure function of (seed, epoch), so that a position in it is all a resume needs.

An epoch passes over every sample once. Its last mini-batch holds what is left and may be smaller; no sample is ever dropped.
"""

import math
from functools import lru_cache

import numpy as np
from attrs import field, frozen
from attrs.validators import ge

from skyrl_engine.contracts.ragged import IntArray


@frozen
class SampleOrder:
    """Mini-batches of `batch_size` out of `samples` samples, shuffled anew every epoch unless `shuffle` is false."""

    samples: int = field(validator=ge(1))
    batch_size: int = field(validator=ge(1))
    seed: int = field(default=0, validator=ge(0))
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.samples / self.batch_size)

    def steps_in(self, epochs: float) -> int:
        """Optimizer steps of this many epochs; a part of an epoch counts its samples, rounded to whole mini-batches, at least one in all."""
        whole = math.floor(epochs)
        part = round((epochs - whole) * self.samples)
        return max(1, whole * self.steps_per_epoch + math.ceil(part / self.batch_size))

    def epoch(self, epoch: int) -> IntArray:
        """int64[samples]: the order of epoch `epoch`, counted from 0; read-only."""
        return _shuffled(self.samples, self.seed, epoch) if self.shuffle else _unshuffled(self.samples)

    def start(self) -> "Position":
        return Position(epoch=0, offset=0)

    def mini_batch(self, position: "Position") -> "tuple[IntArray, Position]":
        """int64[n]: the samples of the mini-batch at `position`, and the position after it."""
        assert 0 <= position.offset < self.samples, f"offset {position.offset} outside an epoch of {self.samples} samples"
        chosen = self.epoch(position.epoch)[position.offset : position.offset + self.batch_size]
        end = position.offset + len(chosen)
        after = Position(position.epoch + 1, 0) if end == self.samples else Position(position.epoch, end)
        return chosen, after


@frozen
class Position:
    """A place between two mini-batches: `offset` samples of epoch `epoch` (counted from 0) are done."""

    epoch: int = field(validator=ge(0))
    offset: int = field(validator=ge(0))


@lru_cache(maxsize=1)
def _shuffled(samples: int, seed: int, epoch: int) -> IntArray:
    """Samples sorted by raw 64-bit draws of PCG64; equal draws keep their samples in place.

    NumPy promises that a bit generator's stream never changes between versions (NEP 19), which it does not promise of
    `Generator.permutation`.
    """
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(samples)
    order = np.argsort(draws, kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


@lru_cache(maxsize=1)
def _unshuffled(samples: int) -> IntArray:
    order = np.arange(samples, dtype=np.int64)
    order.setflags(write=False)
    return order
