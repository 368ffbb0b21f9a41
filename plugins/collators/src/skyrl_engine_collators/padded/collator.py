"""The collator: its options and checks, and the conversion of NumPy arrays to tensors."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from attrs import frozen

from skyrl_engine.contracts import (
    BatchPlan,
    Carried,
    DenseBatch,
    Layout,
    MicroBatchPlan,
    Ragged,
    SampleColumns,
    SampleLengths,
)
from skyrl_engine_collators.extras import CARRIES, build_extras
from skyrl_engine_collators.kernels import kernels
from skyrl_engine_collators.overlong import check_maximum_length
from skyrl_engine_collators.padded import native, vectorized
from skyrl_engine_collators.padded.planner import plan_padded
from skyrl_engine_collators.padded.vectorized import PaddedRows, field_names
from skyrl_engine_collators.wide import wide_fields


@frozen
class PaddedCollator:
    """One sample per row, prompt then response, flush right (see the distribution's README for every field).

    `pad_token_id` fills the left of a row. A sample longer than `max_sequence_length` tokens is an error or a warning, by `overlong`.
    """

    rows: ClassVar[Literal["padded"]] = "padded"
    carries: ClassVar[frozenset[Carried]] = CARRIES

    pad_token_id: int = 0
    max_sequence_length: int | None = None
    overlong: Literal["error", "warn"] = "error"

    def plan(self, lengths: SampleLengths, layout: Layout) -> BatchPlan:
        """See the contract. Raises DataError for a sample longer than allowed, or a group, unit or sample that fits nowhere."""
        check_maximum_length(lengths, self.max_sequence_length, self.overlong)
        return plan_padded(lengths, layout)

    def build(self, columns: SampleColumns, micro_batch: MicroBatchPlan, *, fields: Sequence[str] | None = None) -> DenseBatch:
        """See the contract. Raises DataError for a sample longer than the plan's width, which was made for other lengths."""
        import torch

        rows = PaddedRows.of(columns, micro_batch)
        wanted = field_names(columns) if fields is None else frozenset(fields)
        compiled = kernels()
        if compiled is None:
            arrays = vectorized.build_fields(columns, rows, self.pad_token_id, wanted)
            gather = vectorized.gather_index(rows)
        else:
            arrays = native.build_fields(compiled, columns, rows, self.pad_token_id, wanted)
            gather = native.gather_index(compiled, rows)
        arrays |= wide_fields(columns, wanted, rows.action_shape, **rows.action_pieces(columns))
        extras, ragged_offsets = build_extras(columns, rows.placement, wanted)
        return DenseBatch(
            fields={name: torch.from_numpy(array) for name, array in (arrays | extras).items()},
            gather=gather,
            sequence_lengths=Ragged(rows.tokens[rows.sample_rows], micro_batch.row_offsets),
            ragged_offsets=ragged_offsets,
        )
