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


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize(("first", "count"), [(0, 5), (2, 3), (5, 0)])
def test_values_are_those_of_the_array_and_of_its_part(dtype: type[np.generic], first: int, count: int) -> None:
    values = np.arange(5).astype(dtype)
    got = arrow_arrays.values_of(arrow_arrays.numbers(values).slice(first, count))
    assert (got.dtype, got.tolist()) == (dtype, values[first : first + count].tolist())
    assert not (count and got.flags.writeable)


def test_missing_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="1 numbers are missing"):
        arrow_arrays.values_of(pa.array([1, None], pa.int64()))
    assert arrow_arrays.values_of(pa.array([], pa.float32())).tolist() == []
