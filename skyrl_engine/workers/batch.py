"""A rank's micro-batches, each built when the backend reaches it: dense model inputs, the positions to score, and their labels."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from attrs import frozen

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.kinds.collator import MODEL_INPUTS, Collator, DenseBatch, as_dense_batch
from skyrl_engine.contracts.values.plan import MicroBatchPlan
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.errors import ContractError
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame
from skyrl_engine.spans import Spans
from skyrl_engine.workers.dispatch import Shard
from skyrl_engine.workers.noise_keys import NoiseKeys
from skyrl_engine.workers.scored_tokens import ScoredTokens, Selection, iterate_scored_tokens


@frozen(eq=False)
class ShardBatch:
    """The `RankBatch` of one shard, or of its micro-batches from `first` up to `last` (None: all that follow).

    `selection` scores the loss-carrying tokens, or every action token. `labels` as in `scored_tokens`. `vocabulary_size` as in `Pass`.
    """

    shard: Shard
    collator: BoundPlugin[Collator]
    selection: Selection
    spans: Spans
    first: int = 0
    last: int | None = None
    labels: str | None = None
    vocabulary_size: int | None = None
    noise: NoiseKeys | None = None

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[MicroBatch]:
        tokens = iterate_scored_tokens(self.shard, self.first, self.last, self.selection, self.labels)
        for plan in self._plans:
            with self.spans("build"):
                micro_batch = self._build(plan, next(tokens))
            yield micro_batch

    @property
    def _plans(self) -> tuple[MicroBatchPlan, ...]:
        return self.shard.micro_batches[self.first : self.last]

    def _build(self, plan: MicroBatchPlan, tokens: ScoredTokens) -> MicroBatch:
        with blame(self.collator.owner, "build"):
            built = self.collator.product.build(self.shard.columns, plan, fields=MODEL_INPUTS)
        dense = as_dense_batch(self.collator.label, built)
        self._check_extras(dense)
        return MicroBatch(
            inputs=self._with_known_padding(dense.fields),
            positions=torch.from_numpy(self._positions(dense, tokens)),
            labels=torch.from_numpy(tokens.labels),
            sequence_lengths=dense.sequence_lengths,
            cu_seqlens=dense.cu_seqlens,
            ragged_offsets=dense.ragged_offsets,
            tree=dense.tree,
            noise=None if self.noise is None else self.noise.make(self.shard.columns, plan, dense),
            sample_ids=tokens.samples.sample_ids,
            step=self.shard.step,
            candidates={name: torch.from_numpy(ids) for name, ids in tokens.candidates.items()},
            samples=tokens.samples,
        )

    def _with_known_padding(self, fields: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return model inputs whose padding, made of the trained model's token, has a row in the embedding of the one that reads it."""
        ids_BT = fields["input_ids"]
        # the engine refuses samples with tokens that the model does not know, so that these are padding
        if self.vocabulary_size is None or int(ids_BT.max()) < self.vocabulary_size:
            return fields
        return {**fields, "input_ids": ids_BT.masked_fill(ids_BT >= self.vocabulary_size, 0)}

    def _check_extras(self, dense: DenseBatch) -> None:
        """A model without its images or routes would train all the same, on something else."""
        for name in self.shard.columns.extras:
            if name in MODEL_INPUTS and name not in dense.fields:
                raise ContractError(
                    f"{self.collator.label} left out {name}, which the samples have",
                    remedy="Build every field that is asked for, or choose another collator",
                )

    def _positions(self, dense: DenseBatch, tokens: ScoredTokens) -> IntArray:
        """Return int64[n], the flat places of the tokens to score. Raises ContractError for a gather index that has other tokens."""
        actions, rows, columns = dense.gather.actions, dense.gather.rows, dense.gather.columns
        expected = tokens.entries
        if len(actions) != len(expected) or not (actions == expected).all():  # in another order, or others
            order = np.argsort(actions, kind="stable")
            if not np.array_equal(actions[order], expected):
                raise ContractError(
                    f"{self.collator.label} says where to score {len(actions)} response tokens of a micro-batch; "
                    f"they are not the {len(expected)} that have a predecessor",
                    remedy="Give the gather index one entry for every action token that has a predecessor",
                )
            rows, columns = rows[order], columns[order]
        positions = rows * dense.fields["input_ids"].shape[1] + columns
        return positions if tokens.kept is None else positions[tokens.kept]
