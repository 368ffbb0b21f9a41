"""Dense fields of columns that hold k numbers per response token: [R, W, k], of the column's own dtype, 0 where there is no token."""

import math
from collections.abc import Container

import numpy as np

from skyrl_engine.contracts import AnyArray, IntArray, SampleColumns
from skyrl_engine_collators.segments import write_segments


def wide_fields(
    columns: SampleColumns, wanted: Container[str], shape: tuple[int, int], *, starts: IntArray, lengths: IntArray, places: IntArray
) -> dict[str, AnyArray]:
    """Return the wide columns that are `wanted`, over rows of this shape.

    Piece i of n goes from `starts[i]` of the action axis to `places[i]` of the rows end to end, `lengths[i]` tokens; int64[n] each, places
    ascending.
    """
    fields: dict[str, AnyArray] = {}
    for name, values in columns.columns.items():
        if values.ndim > 1 and name in wanted:
            flat = np.empty((math.prod(shape), values.shape[1]), dtype=values.dtype)
            write_segments(flat, 0, values, starts=starts, lengths=lengths, places=places)
            fields[name] = flat.reshape(*shape, values.shape[1])
    return fields


def narrow_columns(columns: SampleColumns) -> dict[str, AnyArray]:
    """Return the loss weights and the columns of one number per response token, by name."""
    return {"loss_weight": columns.loss_weight, **{name: values for name, values in columns.columns.items() if values.ndim == 1}}
