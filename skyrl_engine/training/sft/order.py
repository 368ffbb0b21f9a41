"""The order in which samples are trained on: a pure function of (seed, epoch), so that a position in it is all a resume needs.

An epoch passes over every sample once. Its last mini-batch holds what is left and may be smaller, as in PyTorch's data loader and in the
trainers of transformers; `drop_last` ends the epoch before it, so that an epoch leaves out fewer than `batch_size` samples, others in each.

Samples that share a group or a unit come together. The cuts between mini-batches, at multiples of `batch_size`, then move back to the next
place between two such bundles: mini-batches hold `batch_size` samples on average, exactly as many where bundles of one size divide it, and
an epoch has as many steps as without bundles.

Where datasets have weights (`mixture`), an epoch draws by them, and its `samples` are those that it draws: some several times, others not at
all.
"""

import math
from collections.abc import Callable

import numpy as np
from attrs import field, frozen
from attrs.validators import ge

from skyrl_engine.contracts.values.bundles import Bundles, inseparable
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.contracts.values.source_names import SOURCE
from skyrl_engine.errors import DataError
from skyrl_engine.training.sft.mixture import DatasetMixture, shuffle_pass


@frozen
class SampleOrder:
    """Mini-batches of `batch_size` out of the `samples` samples of an epoch, shuffled again every epoch unless `shuffle` is false.

    `bundles` (None: every sample on its own) are never cut. Raises DataError for one that is larger than `batch_size`, and for `drop_last`
    where no mini-batch is full.
    """

    samples: int = field(validator=ge(1))
    batch_size: int = field(validator=ge(1))
    seed: int = field(default=0, validator=ge(0))
    shuffle: bool = True
    bundles: Bundles | None = field(default=None, eq=False, repr=False)
    drop_last: bool = field(default=False)
    mixture: DatasetMixture | None = field(default=None, eq=False, repr=False)
    _latest: dict[int, tuple[IntArray, IntArray | None]] = field(factory=dict, init=False, eq=False, repr=False)

    @bundles.validator
    def _check_bundles(self, _attribute: object, bundles: Bundles | None) -> None:
        largest = 0 if bundles is None else int(bundles.sizes.max())
        if largest > self.batch_size:
            raise DataError(
                f"a group of {largest} samples does not fit a mini-batch of training.batch_size = {self.batch_size}",
                remedy=f"Set training.batch_size to {largest} or more",
            )

    @drop_last.validator
    def _check_drop_last(self, _attribute: object, drop_last: bool) -> None:
        if drop_last and self.samples < self.batch_size:
            raise DataError(
                f"training.drop_last leaves out every mini-batch: training.batch_size is {self.batch_size} and the data has "
                f"{self.samples} samples",
                remedy=f"Set training.batch_size to {self.samples} or less, or training.drop_last to false",
            )

    @classmethod
    def of(
        cls,
        columns: SampleColumns,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        mix: Callable[[IntArray, Bundles | None], DatasetMixture] | None = None,
    ) -> "SampleOrder":
        """The order of these samples, which keeps groups and units together.

        `mix` makes a mixture of the number of each sample's dataset, int64[N], and the bundles. Raises what it raises.
        """
        labels = inseparable(columns.group_ids, columns.unit_ids)
        everything = np.arange(len(columns), dtype=np.int64)
        alone = np.array_equal(labels, everything)
        bundles = None if alone else Bundles.by_label(everything, labels)
        if mix is None:
            return cls(len(columns), batch_size, seed, shuffle, bundles, drop_last)
        mixture = mix(columns.sample_values.get(SOURCE, np.zeros_like(everything)), bundles)
        samples = sum(mixture.draws) * (1 if bundles is None else int(bundles.sizes[0]))
        return cls(samples, batch_size, seed, shuffle, bundles, drop_last, mixture)

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch_size if self.drop_last else math.ceil(self.samples / self.batch_size)

    @property
    def left_out(self) -> int:
        """Return the number of samples that the first epoch leaves out."""
        return self.samples - self._stop(self._order_of(0)[1])

    def steps_in(self, epochs: float) -> int:
        """Optimizer steps of this many epochs; a part of an epoch counts its samples, rounded to whole mini-batches, at least one in all."""
        whole = math.floor(epochs)
        part = round((epochs - whole) * self.samples)
        return max(1, whole * self.steps_per_epoch + min(math.ceil(part / self.batch_size), self.steps_per_epoch))

    def epoch(self, epoch: int) -> IntArray:
        """int64[samples]: the order of epoch `epoch`, counted from 0; read-only."""
        return self._order_of(epoch)[0]

    def start(self) -> "Position":
        return Position(epoch=0, offset=0)

    def mini_batch(self, position: "Position") -> "tuple[IntArray, Position]":
        """int64[n]: the samples of the mini-batch at `position`, and the position after it."""
        assert 0 <= position.offset < self.samples, f"offset {position.offset} outside an epoch of {self.samples} samples"
        order, ends = self._order_of(position.epoch)
        if self._is_over(position.offset, ends):  # a resume has asked for drop_last
            return self.mini_batch(Position(position.epoch + 1, 0))
        end = self._end(position.offset, ends)
        after = Position(position.epoch + 1, 0) if self._is_over(end, ends) else Position(position.epoch, end)
        return order[position.offset : end], after

    def _is_over(self, offset: int, ends: IntArray | None) -> bool:
        """Say if the epoch has no mini-batch from `offset` on."""
        if self.drop_last and ends is None:
            return self.samples - offset < self.batch_size
        return offset >= self._stop(ends)

    def _stop(self, ends: IntArray | None) -> int:
        """Return the end of an epoch's last mini-batch; with `drop_last`, of the last one that can be full."""
        full = self.samples // self.batch_size * self.batch_size
        if not self.drop_last or full == self.samples:
            return self.samples
        return full if ends is None else int(ends[np.searchsorted(ends, full, side="right") - 1])

    def _end(self, offset: int, ends: IntArray | None) -> int:
        """Return the end of the mini-batch that starts at `offset`."""
        if ends is None:
            return min(offset + self.batch_size, self.samples)
        multiples = np.arange(1, math.ceil(self.samples / self.batch_size), dtype=np.int64) * self.batch_size
        # no bundle is larger than a mini-batch, so every cut moves back by less than one and none meets the cut before
        cuts = np.array([0, *ends[np.searchsorted(ends, multiples, side="right") - 1], self.samples], dtype=np.int64)
        following = int(np.searchsorted(cuts, offset, side="right"))
        if cuts[following - 1] == offset:
            return int(cuts[following])
        # the batch size has changed since this epoch began
        return int(ends[np.searchsorted(ends, offset + self.batch_size, side="right") - 1])

    def _order_of(self, epoch: int) -> tuple[IntArray, IntArray | None]:
        """int64[samples], the order of an epoch, and int64[bundles], where in it each bundle ends; those of the latest epoch are kept."""
        if epoch not in self._latest:
            self._latest.clear()
            self._latest[epoch] = self._plan(epoch)
        return self._latest[epoch]

    def _plan(self, epoch: int) -> tuple[IntArray, IntArray | None]:
        if self.mixture is not None:
            order = self.mixture.order(self.seed, epoch, shuffle=self.shuffle)
        else:
            count = self.samples if self.bundles is None else len(self.bundles)
            order = shuffle_pass(count, [self.seed, epoch]) if self.shuffle else np.arange(count, dtype=np.int64)
        ends = None
        if self.bundles is not None:
            ordered = self.bundles.members.take(order)
            order, ends = ordered.values, ordered.offsets[1:]
        order.setflags(write=False)
        return order, ends


@frozen
class Position:
    """A place between two mini-batches: `offset` samples of epoch `epoch` (counted from 0) are done."""

    epoch: int = field(validator=ge(0))
    offset: int = field(validator=ge(0))
