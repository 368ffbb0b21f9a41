"""Collators of trees that are each wrong in one way."""

import numpy as np
from attrs import evolve
from collators_made_wrong import DelegatingTree, change_ranks
from torch import from_numpy

from skyrl_engine.contracts import GatherIndex, Ragged


class TreeChange(DelegatingTree):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        return self.change(batch, micro_batch)

    def change(self, batch, micro_batch):
        raise NotImplementedError


class SeesItsSibling(TreeChange):
    """Every segment continues the one before it."""

    def change(self, batch, micro_batch):
        parents = [np.arange(-1, len(row) - 1) if len(row) else row for row in batch.tree.parents]
        return evolve(batch, tree=evolve(batch.tree, parents=Ragged.from_list(parents, np.int64)))


class StartsPositionsAgain(TreeChange):
    """Positions count from 0 behind a shared prefix."""

    def change(self, batch, micro_batch):
        if "position_ids" not in batch.fields:
            return batch
        counted = np.zeros_like(batch["position_ids"].numpy())
        for row, lengths in enumerate(batch.tree.lengths):
            places = [np.arange(length) for length in lengths.tolist()]
            counted[row, : int(lengths.sum())] = np.concatenate([np.zeros(0, np.int64), *places])
        return evolve(batch, fields={**batch.fields, "position_ids": from_numpy(counted)})


class ScoresFirstTokensFromTheColumnBefore(TreeChange):
    """The first token behind a prefix is predicted by whatever stands before it in the row, the end of a sibling."""

    def change(self, batch, micro_batch):
        gather = batch.gather
        columns = gather.columns.copy()
        for place in range(1, len(columns)):
            if gather.rows[place] == gather.rows[place - 1] and columns[place] < columns[place - 1]:
                columns[place] = columns[place - 1]
        return evolve(batch, gather=GatherIndex(gather.actions, gather.rows, columns))


class ScoresSharedTokensOnce(TreeChange):
    """A response token that several samples share has an entry for the first of them alone."""

    def change(self, batch, micro_batch):
        gather = batch.gather
        seen, kept = set(), []
        ids = batch["input_ids"].numpy() if "input_ids" in batch.fields else None
        for place, (row, column) in enumerate(zip(gather.rows.tolist(), gather.columns.tolist(), strict=True)):
            following = None if ids is None or column + 1 >= ids.shape[1] else int(ids[row, column + 1])
            if (row, column, following) not in seen:
                kept.append(place)
            seen.add((row, column, following))
        return evolve(batch, gather=GatherIndex(gather.actions[kept], gather.rows[kept], gather.columns[kept]))


class SharesWithWhoeverComesBefore(DelegatingTree):
    """Takes a prefix of one token for granted: that of another group where the sample before is of another."""

    def plan(self, lengths, layout):
        def share(ranks):
            return tuple(tuple(self._share(micro_batch) for micro_batch in rank) for rank in ranks)

        return change_ranks(super().plan(lengths, layout), share)

    def _share(self, micro_batch):
        shared = np.maximum(micro_batch.shared, 1)
        shared[micro_batch.row_offsets[:-1][np.diff(micro_batch.row_offsets) > 0]] = 0
        return evolve(micro_batch, shared=shared)

    def build(self, columns, micro_batch, *, fields=None):
        """The prefix is that of the sample before, whatever this one has."""
        ids = columns.input_ids.copy()
        for place in np.flatnonzero(micro_batch.shared).tolist():
            one, other = (int(columns.token_offsets[micro_batch.samples[number]]) for number in (place, place - 1))
            count = int(micro_batch.shared[place])
            ids[one : one + count] = ids[other : other + count]
        return super().build(evolve(columns, input_ids=ids), micro_batch, fields=fields)


class SaysThatItSharesMore(TreeChange):
    """Lays rows out without sharing, and says that it shares."""

    def build(self, columns, micro_batch, *, fields=None):
        return self.inner.build(columns, evolve(micro_batch, shared=None, width=self._width(columns, micro_batch)), fields=fields)

    def _width(self, columns, micro_batch):
        tokens = np.diff(columns.token_offsets)[micro_batch.samples]
        widest = max(
            (int(tokens[a:b].sum()) for a, b in zip(micro_batch.row_offsets, micro_batch.row_offsets[1:], strict=False)), default=1
        )
        return max(widest, micro_batch.width)


class LeavesOutTheTree(TreeChange):
    def change(self, batch, micro_batch):
        return evolve(batch, tree=None)


class BoundsTrees(TreeChange):
    """Gives bounds of samples, as packed rows have them."""

    def change(self, batch, micro_batch):
        return evolve(batch, cu_seqlens=Ragged.from_list([[0, micro_batch.width]] * micro_batch.rows, np.int32))
