"""A batch and how it is cut."""

from collections.abc import Mapping

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import BatchPlan, MiniBatchPlan
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, Ragged


@frozen
class Shares:
    """Numbers of micro-batches of a mini-batch, equal on every rank: a step computes the first `learned` of them with gradients, and `scored`
    after them without.

    Those that follow hold samples without a token that carries loss; a step does not compute them.
    """

    learned: int
    scored: int


@frozen(eq=False)
class Plan:
    """A batch, cut once: every pass over it sees the same samples in the same rows, so scores of one pass equal those of the next bit for bit.

    `len(plan)` is its number of mini-batches, each of which is one optimizer step. `shares` say of each mini-batch which micro-batches have no
    gradient and were set apart; None: no sample was. Made by `Engine.plan`.
    """

    columns: SampleColumns
    cut: BatchPlan
    shares: tuple[Shares, ...] | None = None

    def __len__(self) -> int:
        return len(self.cut.mini_batches)

    def micro_batches(self, mini_batch: int) -> int:
        """Count the micro-batches that every data-parallel rank runs of a mini-batch."""
        return len(self.cut.mini_batches[mini_batch].ranks[0])

    def without_work(self, mini_batch: int) -> IntArray:
        """int64[n]: the samples of a mini-batch that a step does not compute."""
        if self.shares is None:
            return np.zeros(0, dtype=np.int64)
        computed = self.shares[mini_batch].learned + self.shares[mini_batch].scored
        left_out = MiniBatchPlan(tuple(rank[computed:] for rank in self.cut.mini_batches[mini_batch].ranks))
        return left_out.samples

    def with_columns(self, columns: Mapping[str, AnyArray | Ragged]) -> "Plan":
        """The same rows with these data columns in addition to, or in the place of, those there are.

        A column is float32[A] on the action axis, flat in the order of the samples, or a `Ragged` with one row per sample in that order.
        Raises DataError for another number of values.
        """
        return evolve(self, columns=self.columns.with_columns(columns))

    def part(self, mini_batch: int, micro_batches: tuple[int, int] | None = None) -> BatchPlan:
        """Cut down to one mini-batch, or to these micro-batches of it on every rank: what one pass covers, as mergers take it."""
        ranks = self.cut.mini_batches[mini_batch].ranks
        first, last = micro_batches or (0, None)
        return BatchPlan((MiniBatchPlan(tuple(rank[first:last] for rank in ranks)),), self.cut.layout, self.cut.sample_ids)
