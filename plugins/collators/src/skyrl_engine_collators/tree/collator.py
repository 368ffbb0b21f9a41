"""The collator: its options and checks, and the conversion of NumPy arrays to tensors."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import frozen

from skyrl_engine.contracts import LEAST_SHARED, BatchPlan, DenseBatch, Layout, MicroBatchPlan, Ragged, SampleColumns, SampleLengths
from skyrl_engine_collators.overlong import check_maximum_length
from skyrl_engine_collators.tree.layout import TreeRows, build_fields, field_names, gather_index, prefix_tree
from skyrl_engine_collators.tree.planner import plan_trees
from skyrl_engine_collators.wide import wide_fields


@frozen
class TreeCollator:
    """Several samples per row, of which common prefixes are computed once; one row is one micro-batch (fields: the distribution's README).

    A row computes at most the smaller of `max_tokens_per_microbatch` and the layout's `micro_batch_tokens`; without either, a rank has one
    row. Prefixes of fewer than `least_shared` tokens are not shared. `pad_token_id` fills the rest of a row. A sample longer than
    `max_sequence_length` tokens is an error or a warning, by `overlong`.
    """

    rows: ClassVar[Literal["tree"]] = "tree"

    pad_token_id: int = 0
    max_tokens_per_microbatch: int | None = None
    least_shared: int = LEAST_SHARED
    max_sequence_length: int | None = None
    overlong: Literal["error", "warn"] = "error"

    def plan(self, lengths: SampleLengths, layout: Layout) -> BatchPlan:
        """See the contract. Raises DataError for a sample longer than allowed, or a group, unit or sample that fits nowhere."""
        check_maximum_length(lengths, self.max_sequence_length, self.overlong)
        limits = [limit for limit in (self.max_tokens_per_microbatch, layout.micro_batch_tokens) if limit is not None]
        return plan_trees(lengths, layout, min(limits, default=None))

    def build(self, columns: SampleColumns, micro_batch: MicroBatchPlan, *, fields: Sequence[str] | None = None) -> DenseBatch:
        """See the contract. Raises DataError for samples that do not fit the plan's rows, or do not share what it says."""
        import torch

        rows = TreeRows.of(columns, micro_batch)
        wanted = field_names(columns) if fields is None else frozenset(fields)
        arrays = build_fields(columns, rows, self.pad_token_id, wanted)
        shape = (len(rows), rows.action_width)
        arrays |= wide_fields(columns, wanted, shape, **rows.action_pieces(columns))
        return DenseBatch(
            fields={name: torch.from_numpy(array) for name, array in arrays.items()},
            gather=gather_index(rows),
            sequence_lengths=Ragged(rows.tokens, rows.row_offsets),
            tree=prefix_tree(rows),
        )
