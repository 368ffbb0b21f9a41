"""A rank's micro-batches, each built when the backend reaches it: dense model inputs, the positions to score, and their labels."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from attrs import frozen

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.kinds.collator import MODEL_INPUTS, Collator, DenseBatch
from skyrl_engine.contracts.values.pairs import roles_in
from skyrl_engine.contracts.values.plan import MicroBatchPlan
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of, segment_indices
from skyrl_engine.errors import ContractError
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.registry.host import blaming
from skyrl_engine.registry.part import Part
from skyrl_engine.spans import Spans
from skyrl_engine.workers.dispatch import Shard

Selection = Literal["loss", "actions"]
"""Tokens that a pass scores: those that carry loss, or all of every response."""


@frozen(eq=False)
class ShardBatch:
    """The `RankBatch` of one shard, or of its micro-batches from `first` up to `last` (None: all that follow).

    `selection` scores the loss-carrying tokens, or every action token.
    """

    shard: Shard
    collator: Part[Collator]
    selection: Selection
    spans: Spans
    first: int = 0
    last: int | None = None

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[MicroBatch]:
        for plan in self._plans:
            with self.spans("build"):
                micro_batch = self._build(plan)
            yield micro_batch

    @property
    def _plans(self) -> tuple[MicroBatchPlan, ...]:
        return self.shard.micro_batches[self.first : self.last]

    def _check_extras(self, dense: DenseBatch) -> None:
        """A model without its images or routes would train all the same, on something else."""
        for name in MODEL_INPUTS:
            if name in self.shard.columns.extras and name not in dense.fields:
                raise ContractError(
                    f"{self.collator.label} left out {name}, which the samples have",
                    remedy="Build every field that is asked for, or choose another collator",
                )

    def _build(self, plan: MicroBatchPlan) -> MicroBatch:
        columns = self.shard.columns
        with blaming(self.collator.owner, "build"):
            dense = self.collator.product.build(columns, plan, fields=MODEL_INPUTS)
        self._check_extras(dense)
        action_counts = np.diff(columns.action_offsets)[plan.samples]
        starts = offsets_of(action_counts)
        flat_actions = segment_indices(columns.action_offsets, plan.samples)  # the micro-batch's action axis in the shard's

        gather = dense.gather
        order = np.argsort(gather.actions, kind="stable")
        if self.selection == "loss":
            order = order[columns.loss_weight[flat_actions[gather.actions[order]]] != 0]
        actions = gather.actions[order]  # ascending, hence in sample order
        chosen = flat_actions[actions]
        carrying = int(np.count_nonzero(columns.loss_weight[flat_actions]))
        if self.selection == "loss" and len(chosen) != carrying:
            raise ContractError(
                f"{self.collator.label} says where to score {len(chosen)} loss-carrying tokens of a micro-batch that has {carrying}",
                remedy="Give the gather index one entry for every action token that has a predecessor",
            )

        owner = np.searchsorted(starts, actions, side="right") - 1
        place = actions - starts[owner]
        first_action = columns.token_offsets[plan.samples + 1] - action_counts
        labels = columns.input_ids[first_action[owner] + place]
        width = dense.fields["input_ids"].shape[1]
        scored = Ragged(place.astype(np.int32), offsets_of(np.bincount(owner, minlength=len(plan.samples))))
        return MicroBatch(
            inputs=dense.fields,
            positions=torch.from_numpy(gather.rows[order] * width + gather.columns[order]),
            labels=torch.from_numpy(labels.astype(np.int64)),
            sequence_lengths=dense.sequence_lengths,
            cu_seqlens=dense.cu_seqlens,
            ragged_offsets=dense.ragged_offsets,
            sample_ids=columns.sample_ids[plan.samples],
            step=self.shard.step,
            candidates={
                name: torch.from_numpy(values[chosen].astype(np.int64))
                for name, values in columns.columns.items()
                if values.dtype.kind == "i"
            },
            samples=ScoredSamples(
                sample_ids=columns.sample_ids[plan.samples],
                group_ids=columns.group_ids[plan.samples],
                unit_ids=columns.unit_ids[plan.samples],
                action_lengths=action_counts,
                scored=scored,
                columns={name: values[chosen] for name, values in columns.columns.items()},
                weights=self.shard.weights_of(chosen, plan.samples[owner]),
                roles=None if (roles := roles_in(columns.sample_values)) is None else roles[plan.samples],
            ),
        )
