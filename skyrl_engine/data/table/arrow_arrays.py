"""Arrow arrays over NumPy's memory, and back.

`pyarrow.array` and `to_numpy` import pandas where that is installed, which costs a process a second of CPU time and 50 MB.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from skyrl_engine.contracts.values.ragged import AnyArray, offsets_of

if TYPE_CHECKING:
    import pyarrow as pa


def numbers(values: AnyArray) -> "pa.Array":
    """Return the numbers [n], of any dtype but bool, without nulls and without a copy if they are contiguous."""
    import pyarrow as pa

    assert values.ndim == 1, "an array of one axis"
    assert values.dtype != np.bool_, "Arrow packs bools"
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def values_of(array: "pa.Array") -> AnyArray:
    """Return the numbers of an array [n], of any type but bool, without a copy. Raises ValueError where some are missing."""
    if array.null_count:
        raise ValueError(f"{array.null_count} numbers are missing")
    dtype = np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(0, dtype=dtype)
    values = np.frombuffer(buffer, dtype=dtype, count=len(array), offset=array.offset * dtype.itemsize)
    # Arrow's arrays are nobody's to change
    values.flags.writeable = False
    return values


def texts(values: Sequence[str]) -> "pa.StringArray":
    """Return the texts, without nulls. Together they take less than 2 GiB."""
    import pyarrow as pa

    encoded = [value.encode() for value in values]
    offsets = offsets_of([len(text) for text in encoded])
    assert offsets[-1] < 2**31, "texts of 2 GiB in one array"
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(encoded)))
