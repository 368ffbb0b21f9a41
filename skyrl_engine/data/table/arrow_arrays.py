"""Arrow arrays over NumPy's memory, and back. `pyarrow.array` imports pandas where that is installed, as `to_numpy` does: see `values_of`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from skyrl_engine.contracts.values.arrow import values_of
from skyrl_engine.contracts.values.ragged import AnyArray, offsets_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["numbers", "texts", "values_of"]


def numbers(values: AnyArray) -> "pa.Array":
    """Return the numbers [n], of any dtype but bool, without nulls and without a copy if they are contiguous."""
    import pyarrow as pa

    assert values.ndim == 1, "an array of one axis"
    assert values.dtype != np.bool_, "Arrow packs bools"
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def texts(values: Sequence[str]) -> "pa.StringArray":
    """Return the texts, without nulls. Together they take less than 2 GiB."""
    import pyarrow as pa

    encoded = [value.encode() for value in values]
    offsets = offsets_of([len(text) for text in encoded])
    assert offsets[-1] < 2**31, "texts of 2 GiB in one array"
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(encoded)))
