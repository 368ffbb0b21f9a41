"""Our collators, to be spoilt in one place."""

import numpy as np
from attrs import evolve

from skyrl_engine.contracts import BatchPlan, MiniBatchPlan
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_collators.tree.collator import TreeCollator


class Delegating:
    """`padded`, to be spoilt in one place."""

    rows = "padded"
    carries = PaddedCollator.carries

    def __init__(self):
        self.inner = PaddedCollator(pad_token_id=7)

    def plan(self, lengths, layout):
        return self.inner.plan(lengths, layout)

    def build(self, columns, micro_batch, *, fields=None):
        return self.inner.build(columns, micro_batch, fields=fields)


def change_ranks(plan, change):
    """The plan with `change` applied to the ranks of every mini-batch."""
    return BatchPlan(tuple(MiniBatchPlan(change(mini.ranks)) for mini in plan.mini_batches), plan.layout, plan.sample_ids)


class DelegatingPacked(Delegating):
    """`packed`, to be spoilt in one place."""

    rows = "packed"

    def __init__(self):
        self.inner = PackedCollator(pad_token_id=7)


class DelegatingTree(Delegating):
    """`tree`, to be spoilt in one place."""

    rows = "tree"
    carries = frozenset()

    def __init__(self):
        self.inner = TreeCollator(pad_token_id=7)


class FieldChange(Delegating):
    field = ""

    def change(self, array):
        raise NotImplementedError

    def build(self, columns, micro_batch, *, fields=None):
        import torch

        batch = super().build(columns, micro_batch, fields=fields)
        if self.field not in batch.fields:
            return batch
        changed = torch.from_numpy(np.ascontiguousarray(self.change(batch[self.field].numpy().copy())))
        return evolve(batch, fields={**batch.fields, self.field: changed})
