"""The collator: its options and checks, and the conversion of NumPy arrays to tensors."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

from attrs import evolve, field, frozen

from skyrl_engine import DataError
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
from skyrl_engine_collators.kernels import Kernels, kernels
from skyrl_engine_collators.overlong import check_maximum_length
from skyrl_engine_collators.padded import native, vectorized
from skyrl_engine_collators.padded.ahead import Ahead
from skyrl_engine_collators.padded.planner import plan_padded
from skyrl_engine_collators.padded.vectorized import PaddedRows, action_names, field_names
from skyrl_engine_collators.wide import wide_fields


@frozen
class PaddedCollator:
    """One sample per row, prompt then response, flush right (see the distribution's README for every field).

    `pad_token_id` fills the left of a row. A sample longer than `max_sequence_length` tokens is an error or a warning, by `overlong`.
    With `group_by_length`, samples of similar length share a micro-batch.
    """

    rows: ClassVar[Literal["padded"]] = "padded"
    carries: ClassVar[frozenset[Carried]] = CARRIES

    pad_token_id: int = 0
    max_sequence_length: int | None = None
    overlong: Literal["error", "warn"] = "error"
    group_by_length: bool = True
    _ahead: Ahead = field(factory=Ahead, init=False, eq=False, repr=False)

    def plan(self, lengths: SampleLengths, layout: Layout) -> BatchPlan:
        """See the contract. Raises DataError for a sample longer than allowed, or a group, unit or sample that fits nowhere."""
        check_maximum_length(lengths, self.max_sequence_length, self.overlong)
        return plan_padded(lengths, layout, group_by_length=self.group_by_length)

    def build(self, columns: SampleColumns, micro_batch: MicroBatchPlan, *, fields: Sequence[str] | None = None) -> DenseBatch:
        """See the contract. Raises DataError for a sample longer than the plan's width, which was made for other lengths."""
        if fields is not None:
            fields = tuple(fields)
            prepared = self._ahead.take(columns, micro_batch, fields)
            if prepared is not None:
                return prepared
        compiled = kernels()
        wanted = field_names(columns) if fields is None else frozenset(fields)
        if compiled is None or fields is None or columns.extras or not wanted.isdisjoint(action_names(columns)):
            return self._build_one(compiled, columns, micro_batch, wanted)
        chosen = self._ahead.choose(micro_batch, partial(_bytes, 8 * len(wanted & native.LETTERS.keys())))
        try:
            built = native.build_tokens(compiled, columns, chosen, self.pad_token_id, wanted)
        except DataError:
            if len(chosen) == 1:
                raise
            chosen = chosen[:1]  # the one that does not fit says so when it is asked for
            built = native.build_tokens(compiled, columns, chosen, self.pad_token_id, wanted)
        return self._ahead.keep(columns, fields, chosen, built)

    def _build_one(
        self, compiled: Kernels | None, columns: SampleColumns, micro_batch: MicroBatchPlan, wanted: frozenset[str]
    ) -> DenseBatch:
        """Build any fields of one micro-batch."""
        import torch

        rows = PaddedRows.of(columns, micro_batch)
        extras, ragged_offsets = build_extras(columns, rows.placement, wanted)
        extras = wide_fields(columns, wanted, rows.action_shape, **rows.action_pieces(columns)) | extras
        if compiled is None:
            arrays = vectorized.build_fields(columns, rows, self.pad_token_id, wanted) | extras
            batch = DenseBatch(
                fields={},
                gather=vectorized.gather_index(rows),
                sequence_lengths=Ragged(rows.tokens[rows.sample_rows], micro_batch.row_offsets),
            )
        else:
            (batch,) = native.build_tokens(compiled, columns, [micro_batch], self.pad_token_id, wanted)
            arrays = native.build_actions(compiled, columns, rows, wanted) | extras
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return evolve(batch, fields={**batch.fields, **tensors}, ragged_offsets=ragged_offsets)


def _bytes(of_a_cell: int, micro_batch: MicroBatchPlan) -> int:
    """Return the most memory that a micro-batch takes: its token fields, and the three places of every response token."""
    return micro_batch.rows * (of_a_cell * micro_batch.width + 24 * micro_batch.action_width)
