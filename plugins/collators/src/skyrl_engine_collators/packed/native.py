"""Dense packed rows from the compiled kernels: what `vectorized.py` builds, byte for byte, each row in one pass."""

from collections.abc import Container

import numpy as np

from skyrl_engine.contracts import AnyArray, GatherIndex, SampleColumns
from skyrl_engine_collators.kernels import Kernels, Source
from skyrl_engine_collators.packed.vectorized import PackedRows
from skyrl_engine_collators.wide import narrow_columns


def build_fields(
    kernels: Kernels, columns: SampleColumns, rows: PackedRows, pad_token_id: int, wanted: Container[str]
) -> dict[str, AnyArray]:
    """Return the fields that are `wanted` and exist. Raises DataError if the columns' offsets point outside of their values."""
    fields: dict[str, AnyArray] = {}

    def field(name: str, width: int, dtype: str, source: Source, fill: int = 0) -> list[tuple[AnyArray, int, Source]]:
        if name not in wanted:
            return []
        fields[name] = array = np.empty((len(rows.row_ends), width), dtype=dtype)
        return [(array, fill, source)]

    kernels.write_rows(
        [
            *field("input_ids", rows.width, "int64", columns.input_ids, pad_token_id),
            *field("attention_mask", rows.width, "int64", "ones"),
            *field("position_ids", rows.width, "int64", "counted"),
        ],
        starts=columns.token_offsets[rows.samples],
        lengths=rows.tokens,
        places=rows.sample_rows * rows.width + rows.columns,
    )
    present = narrow_columns(columns)
    on_actions = []
    for name, values in present.items():
        on_actions += field(name, rows.width - 1, "float32", values)
    kernels.write_rows(
        on_actions,
        starts=rows.first_scored,
        lengths=rows.scored,
        places=rows.sample_rows * (rows.width - 1) + rows.first_slot,
    )
    return fields


def gather_index(kernels: Kernels, rows: PackedRows) -> GatherIndex:
    """Return what `vectorized.gather_index` returns."""
    shape = (int(rows.scored.sum()),)
    index = (np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64))
    kernels.write_gather(
        index, sample_rows=rows.sample_rows, actions=rows.actions, scored=rows.scored, first_columns=rows.first_slot
    )
    return GatherIndex(*index)
