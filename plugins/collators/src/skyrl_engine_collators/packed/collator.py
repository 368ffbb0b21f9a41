"""The collator: its options and checks, and the conversion of NumPy arrays to tensors."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import frozen

from skyrl_engine.contracts import BatchPlan, Carried, DenseBatch, Layout, MicroBatchPlan, SampleColumns, SampleLengths
from skyrl_engine_collators.extras import CARRIES, build_extras
from skyrl_engine_collators.kernels import kernels
from skyrl_engine_collators.overlong import check_maximum_length
from skyrl_engine_collators.packed import native, vectorized
from skyrl_engine_collators.packed.planner import Packing, plan_packed
from skyrl_engine_collators.packed.policies import Policy
from skyrl_engine_collators.packed.vectorized import PackedRows, field_names
from skyrl_engine_collators.wide import wide_fields


@frozen
class PackedCollator:
    """Several samples per row, one after the other; one row is one micro-batch (see the distribution's README for every field).

    A row holds at most the smaller of `max_tokens_per_microbatch` and the layout's `micro_batch_tokens`; without either, a rank has one row.
    With `strict_capacity` the alignment of samples counts as tokens of the row. `pad_token_id` fills the rest of a row. A sample longer than
    `max_sequence_length` tokens is an error or a warning, by `overlong`.
    """

    rows: ClassVar[Literal["packed"]] = "packed"
    carries: ClassVar[frozenset[Carried]] = CARRIES

    pad_token_id: int = 0
    policy: Policy = "ffd"
    max_tokens_per_microbatch: int | None = None
    strict_capacity: bool = True
    max_sequence_length: int | None = None
    overlong: Literal["error", "warn"] = "error"

    def plan(self, lengths: SampleLengths, layout: Layout) -> BatchPlan:
        """See the contract. Raises DataError for a sample longer than allowed, or a group, unit or sample that fits nowhere."""
        check_maximum_length(lengths, self.max_sequence_length, self.overlong)
        limits = [limit for limit in (self.max_tokens_per_microbatch, layout.micro_batch_tokens) if limit is not None]
        return plan_packed(lengths, layout, Packing(self.policy, min(limits, default=None), self.strict_capacity))

    def build(self, columns: SampleColumns, micro_batch: MicroBatchPlan, *, fields: Sequence[str] | None = None) -> DenseBatch:
        """See the contract. Raises DataError for samples longer than the plan's rows, which were made for other lengths."""
        import torch

        rows = PackedRows.of(columns, micro_batch)
        wanted = field_names(columns) if fields is None else frozenset(fields)
        compiled = kernels()
        if compiled is None:
            arrays = vectorized.build_fields(columns, rows, self.pad_token_id, wanted)
            gather = vectorized.gather_index(rows)
        else:
            arrays = native.build_fields(compiled, columns, rows, self.pad_token_id, wanted)
            gather = native.gather_index(compiled, rows)
        arrays |= wide_fields(columns, wanted, rows.action_shape, **rows.action_pieces())
        extras, ragged_offsets = build_extras(columns, rows.placement, wanted)
        return DenseBatch(
            fields={name: torch.from_numpy(array) for name, array in (arrays | extras).items()},
            gather=gather,
            sequence_lengths=rows.sequence_lengths,
            cu_seqlens=rows.cu_seqlens,
            ragged_offsets=ragged_offsets,
        )
