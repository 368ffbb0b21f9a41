"""A collator of this engine as `data_collator` of transformers' Trainer and TRL's SFTTrainer, or as `collate_fn` of a DataLoader."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.errors import DataError, ResultError, UnsupportedError
from skyrl_engine.interop.hf_rows import IGNORED, LabelledDocuments, LaidOut, Row, read_documents
from skyrl_engine.interop.selection import NO_OPTIONS, Options, select_plugin

if TYPE_CHECKING:
    import torch

    from skyrl_engine.contracts.kinds.collator import Collator, DenseBatch
    from skyrl_engine.contracts.values.plan import MicroBatchPlan
    from skyrl_engine.contracts.values.ragged import IntArray
    from skyrl_engine.registry.bound_plugin import BoundPlugin


def hf_collator(
    collator: object = "padded",
    *,
    options: Options = NO_OPTIONS,
    pad_token_id: int = 0,
    varlen: bool = False,
    every_token: bool = False,
    ignore: Sequence[str] = (),
) -> "HfCollator":
    """Return a `data_collator` that lays rows out by this collator, as arguments of a causal language model's forward.

    `collator` is a name as in a configuration ("padded", "packed", "./mine.py:rows") or the plugin itself, `options` are its own.
    With `varlen`, packed rows also carry `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, which
    FlashAttention reads. Rows of `input_ids` alone are refused, unless `every_token` says that all of their tokens are trained; keys of a
    row that are to be dropped stand in `ignore`.

    Raises UnsupportedError for a collator of trees and for `varlen` of padded rows, DataError for a `pad_token_id` that is no token,
    ConfigError for options, and what selecting a plugin raises.
    """
    from skyrl_engine.contracts.kinds.context import FactoryContext
    from skyrl_engine.registry.resolve import Registry

    if not isinstance(pad_token_id, int) or pad_token_id < 0:
        raise DataError(
            f"pad_token_id is {pad_token_id!r}", remedy="Give any token of the vocabulary: padding is masked, and carries no loss"
        )
    selected = select_plugin(Registry.discover(), "collator", collator, options)
    bound: BoundPlugin[Collator] = selected.bind("collator", FactoryContext(pad_token_id=pad_token_id))
    if bound.product.rows == "tree":
        raise UnsupportedError(
            f"{bound.label} lays a common prefix out once, and labels name one next token of each position, where several follow a prefix",
            remedy="Choose the collator padded or packed, or train with it by this engine",
        )
    if varlen and bound.product.rows != "packed":
        raise UnsupportedError(
            f"varlen arguments say where the documents of packed rows begin, and {bound.label} makes {bound.product.rows} rows",
            remedy="Choose the collator packed, or leave varlen out",
        )
    again = partial(
        hf_collator,
        collator,
        options=dict(options),
        pad_token_id=pad_token_id,
        varlen=varlen,
        every_token=every_token,
        ignore=tuple(ignore),
    )
    return HfCollator(bound, varlen, every_token, tuple(ignore), again)


@frozen(eq=False)
class HfCollator:
    """The product of `hf_collator`; workers of a DataLoader get it by pickling what it was made of."""

    collator: "BoundPlugin[Collator]"
    varlen: bool
    every_token: bool
    ignore: tuple[str, ...]
    made_by: "Callable[[], HfCollator]"

    def __reduce__(self) -> "tuple[Callable[[], HfCollator], tuple[()]]":
        return self.made_by, ()

    def __call__(self, rows: Sequence[Row]) -> "dict[str, torch.Tensor | int | bool]":
        """Return the batch of these rows: `model(**batch)` computes the loss of every label that is not -100.

        A row has `input_ids` [T], and any of `labels`, `completion_mask`, `assistant_masks`, `attention_mask` [T] and `seq_lengths`, the
        lengths of the documents in it (`read_documents` describes each).

        Padded: `input_ids`, `labels`, `attention_mask` and `position_ids`, int64[B, T], a document per row, in the order of the rows.
        Packed: `input_ids`, `labels` and `position_ids`, int64[K, W], documents in the collator's order (K = 1 without a limit of tokens),
        and `use_cache` False, since transformers keeps documents apart only without a cache. A mask would make it join them, so there is
        none. The label of a document's first token is -100: nothing before it predicts it.

        Raises DataError for rows that do not fit, PluginBrokenError where the collator fails, ResultError for a result that is no batch.
        """
        documents = read_documents(rows, every_token=self.every_token, ignore=self.ignore)
        return self.lay_out(documents).batch

    def lay_out(self, documents: LabelledDocuments) -> LaidOut:
        """Return the batch of these documents, and where each of their tokens is."""
        import torch

        dense, samples = self._build(documents)
        documents = documents.take(samples)
        gather = dense.gather
        # every token but the first of each document is an action
        actions = np.delete(documents.labels, documents.offsets[:-1])
        labels = torch.full_like(dense["input_ids"], IGNORED)
        labels[torch.from_numpy(gather.rows), torch.from_numpy(gather.columns + 1)] = torch.from_numpy(actions[gather.actions])
        batch: dict[str, torch.Tensor | int | bool] = {"input_ids": dense["input_ids"], "labels": labels}
        if self.collator.product.rows == "padded":
            batch |= {"attention_mask": dense["attention_mask"], "position_ids": dense["position_ids"]}
        else:
            batch |= {"position_ids": dense["position_ids"], "use_cache": False}
        if self.varlen:
            batch |= self._mark_documents(dense)
        return LaidOut(batch, documents, gather)

    def check_model(self, model: Any) -> None:
        """Try the model with three documents of this collator. It must score each as it scores it alone.

        Raises UnsupportedError for a model whose forward does not take the batch, and for one whose documents see each other or their padding.
        """
        from skyrl_engine.interop.document_check import check_documents

        check_documents(self.lay_out, self.collator.label, model)

    def _build(self, documents: LabelledDocuments) -> "tuple[DenseBatch, IntArray]":
        """Return the rows of these documents, and the documents' numbers in the order of the rows."""
        from skyrl_engine.contracts.kinds.collator import ONE_RANK, as_dense_batch
        from skyrl_engine.contracts.values.columns import SampleColumns
        from skyrl_engine.contracts.values.plan import as_batch_plan
        from skyrl_engine.contracts.values.ragged import offsets_of
        from skyrl_engine.registry.owner import blame

        offsets = documents.offsets
        trained = np.delete(documents.labels, offsets[:-1]) != IGNORED
        columns = SampleColumns.create(
            input_ids=documents.input_ids,
            token_offsets=offsets,
            action_offsets=offsets_of(np.diff(offsets) - 1),
            loss_weight=trained,
        )
        label, product = self.collator.label, self.collator.product
        with blame(self.collator.owner, "plan"):
            plan = as_batch_plan(label, product.plan(columns.lengths, ONE_RANK)).joined
        if not np.array_equal(np.sort(plan.samples), np.arange(len(columns))):
            raise ResultError(f"{label} planned other samples than there are", remedy=self.collator.owner.remedy)
        if product.rows == "padded":
            plan = _restore_order(plan)
        with blame(self.collator.owner, "build"):
            dense = product.build(columns, plan, fields=("input_ids", "attention_mask", "position_ids"))
        return as_dense_batch(label, dense), plan.samples

    def _mark_documents(self, dense: "DenseBatch") -> "dict[str, torch.Tensor | int]":
        """Return where documents begin in the rows laid end to end; what is left of a row is one more of them."""
        import torch

        starts = dense.cu_seqlens
        if starts is None:
            raise ResultError(f"{self.collator.label} returned no cu_seqlens from build", remedy="Return them, or leave varlen out")
        rows, width = dense["input_ids"].shape
        places = np.concatenate([starts[row].astype(np.int64) + row * width for row in range(rows)])
        bounds: IntArray = np.unique(np.concatenate([places, np.arange(rows + 1) * width]))
        cumulative = torch.from_numpy(bounds.astype(np.int32))
        longest = int(np.diff(bounds).max())
        return {
            "cu_seq_lens_q": cumulative,
            "cu_seq_lens_k": cumulative,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def _restore_order(plan: "MicroBatchPlan") -> "MicroBatchPlan":
    """Return the plan with its samples in the caller's order, one per row."""
    count = len(plan.samples)
    return evolve(plan, samples=np.arange(count, dtype=np.int64), row_offsets=np.arange(count + 1, dtype=np.int64), order=None)
