"""Dense padded rows from the compiled kernels: what `vectorized.py` builds, byte for byte, each row in one pass."""

from collections.abc import Callable, Container, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from skyrl_engine import DataError
from skyrl_engine.contracts import AnyArray, DenseBatch, GatherIndex, MicroBatchPlan, Ragged, SampleColumns
from skyrl_engine_collators.kernels import Kernels, Source
from skyrl_engine_collators.padded.vectorized import PaddedRows
from skyrl_engine_collators.wide import narrow_columns

if TYPE_CHECKING:
    import torch

LETTERS = {"input_ids": "t", "attention_mask": "m", "position_ids": "p"}
"""Fields on the token axis, and what `write_padded` calls them."""


def build_tokens(
    kernels: Kernels, columns: SampleColumns, micro_batches: Sequence[MicroBatchPlan], pad_token_id: int, wanted: frozenset[str]
) -> list[DenseBatch]:
    """Build the `wanted` fields on the token axis, the gather index and the lengths of each micro-batch.

    One call writes all of them: a small micro-batch costs less than the arguments of several. Raises DataError for a sample longer than
    the plan's rows, or columns whose offsets point outside of their values.
    """
    names, letters = _token_fields(wanted)
    try:
        out, (actions, rows, places), lengths, scored = kernels.write_padded(columns, micro_batches, letters, pad_token_id)
    except DataError:
        for micro_batch in micro_batches:
            PaddedRows.of(columns, micro_batch)  # names the sample, if it is one
        raise
    to_tensor = _from_numpy()
    built = []
    cell = entry = sample = 0
    for micro_batch, count in zip(micro_batches, scored, strict=True):
        row_offsets, width = micro_batch.row_offsets, micro_batch.width
        height = len(row_offsets) - 1
        end, last, after = cell + len(names) * height * width, entry + count, sample + len(micro_batch.samples)
        built.append(
            DenseBatch(
                dict(zip(names, map(to_tensor, out[cell:end].reshape(len(names), height, width)), strict=True)),
                GatherIndex(actions[entry:last], rows[entry:last], places[entry:last]),
                Ragged(lengths[sample:after], row_offsets),
            )
        )
        cell, entry, sample = end, last, after
    return built


@cache
def _from_numpy() -> "Callable[[AnyArray], torch.Tensor]":
    """Return what makes tensors of arrays; a planner imports this module, and no torch."""
    import torch

    return torch.from_numpy


@cache
def _token_fields(wanted: frozenset[str]) -> tuple[tuple[str, ...], str]:
    """Return the names of those on the token axis, and their letters."""
    names = tuple(name for name in LETTERS if name in wanted)
    return names, "".join(LETTERS[name] for name in names)


def build_actions(kernels: Kernels, columns: SampleColumns, rows: PaddedRows, wanted: Container[str]) -> dict[str, AnyArray]:
    """Return the `wanted` fields on the action axis that exist. Raises DataError if the columns' offsets point outside of their values."""
    fields: dict[str, AnyArray] = {}

    def field(name: str, dtype: str, source: Source) -> list[tuple[AnyArray, int, Source]]:
        if name not in wanted:
            return []
        fields[name] = array = np.empty((len(rows.tokens), rows.action_width), dtype=dtype)
        return [(array, 0, source)]

    actions = rows.actions[rows.sample_rows]
    written = field("response_mask", "int64", "ones")
    present = narrow_columns(columns)
    for name, values in present.items():
        written += field(name, "float32", values)
    kernels.write_rows(
        written,
        starts=columns.action_offsets[rows.samples],
        lengths=actions,
        places=(rows.sample_rows + 1) * rows.action_width - actions,
    )
    return fields
