"""Arrays are those that pyarrow makes, and are made without pandas."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from skyrl_engine.data.table import arrow_arrays


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float32, np.float64])
def test_numbers_are_pyarrows(dtype: type[np.generic]) -> None:
    for values in (np.arange(7).astype(dtype), np.zeros(0, dtype), np.arange(12).astype(dtype)[::3]):
        array = arrow_arrays.numbers(values)
        array.validate(full=True)
        assert array.equals(pa.array(values))


def test_texts_are_pyarrows() -> None:
    for values in ([], [""], ["a", "", "späte Übung", "\N{SNOWMAN}"]):
        array = arrow_arrays.texts(values)
        array.validate(full=True)
        assert array.equals(pa.array(values, type=pa.string()))


def test_neither_imports_pandas() -> None:
    lines = (
        "import sys, numpy, pyarrow",
        "from skyrl_engine.data.table import arrow_arrays as made",
        "batch = pyarrow.RecordBatch.from_arrays([made.numbers(numpy.arange(2)), made.texts(['a', 'b'])], names=['n', 't'])",
        "assert batch.num_rows == 2 and 'pandas' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
