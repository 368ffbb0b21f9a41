"""Dense padded rows from the compiled kernels: what `vectorized.py` builds, byte for byte, each row in one pass."""

from collections.abc import Container

import numpy as np

from skyrl_engine.contracts import AnyArray, GatherIndex, SampleColumns
from skyrl_engine_collators.kernels import Kernels, Source
from skyrl_engine_collators.padded.vectorized import PaddedRows
from skyrl_engine_collators.wide import narrow


def build_fields(
    kernels: Kernels, columns: SampleColumns, rows: PaddedRows, pad_token_id: int, wanted: Container[str]
) -> dict[str, AnyArray]:
    """Return the fields that are `wanted` and exist. Raises DataError if the columns' offsets point outside of their values."""
    fields: dict[str, AnyArray] = {}

    def field(name: str, width: int, dtype: str, source: Source, fill: int = 0) -> list[tuple[AnyArray, int, Source]]:
        if name not in wanted:
            return []
        fields[name] = array = np.empty((len(rows.tokens), width), dtype=dtype)
        return [(array, fill, source)]

    tokens, actions = rows.tokens[rows.sample_rows], rows.actions[rows.sample_rows]
    kernels.write_rows(
        [
            *field("input_ids", rows.width, "int64", columns.input_ids, pad_token_id),
            *field("attention_mask", rows.width, "int64", "ones"),
            *field("position_ids", rows.width, "int64", "counted"),
        ],
        starts=columns.token_offsets[rows.samples],
        lengths=tokens,
        places=(rows.sample_rows + 1) * rows.width - tokens,
    )
    on_actions = field("response_mask", rows.action_width, "int64", "ones")
    present = narrow(columns)
    for name, values in present.items():
        on_actions += field(name, rows.action_width, "float32", values)
    kernels.write_rows(
        on_actions,
        starts=columns.action_offsets[rows.samples],
        lengths=actions,
        places=(rows.sample_rows + 1) * rows.action_width - actions,
    )
    return fields


def gather_index(kernels: Kernels, rows: PaddedRows) -> GatherIndex:
    """Return what `vectorized.gather_index` returns."""
    tokens, actions = rows.tokens[rows.sample_rows], rows.actions[rows.sample_rows]
    unscored = tokens == actions  # the response begins the sample, and nothing predicts its first token
    scored = actions - unscored
    shape = (int(scored.sum()),)
    index = (np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64))
    kernels.write_gather(index, sample_rows=rows.sample_rows, actions=actions, scored=scored, first_columns=rows.width - scored - 1)
    return GatherIndex(*index)
