"""Per-token outputs as columns take no Python code and no Python object per sample or token, where dicts take one of each.

How much less CPU time that is, `nox -s bench` prints beside its bar (tests/benchmarks/outputs_columnar.py).
"""

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import outputs_columnar
import pytest
from outputs_columnar import Outputs, make_outputs, send, sort_by_id

MICRO_BATCHES = 16


def make(monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int) -> Outputs:
    """Outputs of as many micro-batches, each of so many rows and tokens per row."""
    for name, size in {"SAMPLES": MICRO_BATCHES * rows, "ROWS": rows, "TOKENS": tokens}.items():
        monkeypatch.setattr(outputs_columnar, name, size)
    return make_outputs()


def count_calls(function: Callable[[], Any]) -> int:
    """Number of functions that Python calls, its own and those of C, on the second call; the first one imports what it needs."""
    function()
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def peak_bytes(function: Callable[[], Any]) -> int:
    """Most memory that Python and NumPy hold at once for the call and what it returns."""
    tracemalloc.start()
    try:
        kept = function()
        assert kept is not None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_both_ways_hold_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = make(monkeypatch, 8, 64)
    merged = outputs.merged(send(outputs.as_columns()))
    assert merged.to_list() == sort_by_id(outputs.as_dicts())


def test_columns_take_no_call_per_sample_or_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rank. Dicts take two calls a sample, so the test sees what it forbids."""
    columns, dicts = {}, {}
    for rows, tokens in ((4, 16), (32, 16), (4, 2048), (32, 2048)):
        outputs = make(monkeypatch, rows, tokens)
        columns[rows, tokens] = count_calls(outputs.as_columns)
        dicts[rows, tokens] = count_calls(outputs.as_dicts)
    assert len(set(columns.values())) == 1, columns
    assert dicts[32, 16] - dicts[4, 16] >= 2 * MICRO_BATCHES * 28


def test_the_callers_order_takes_a_call_per_thousands_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are copied in chunks that fit into the cache, long samples by another way than short ones."""
    for rows, tokens in ((4, 16), (32, 16), (4, 2048), (32, 2048), (4, 16384)):
        outputs = make(monkeypatch, rows, tokens)
        received = outputs.as_columns()
        calls = count_calls(lambda outputs=outputs, received=received: outputs.merged(received))
        assert calls <= 400 + 2 * MICRO_BATCHES * rows * tokens // 2000, (rows, tokens)


def test_columns_hold_no_object_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fields of float32: the columns, and the parts that they are joined of. A Python float in a list takes eight times a float32."""
    outputs = make(monkeypatch, 8, 2048)
    arrays = 2 * 4 * MICRO_BATCHES * 8 * 2048
    outputs.as_columns()
    assert peak_bytes(outputs.as_columns) <= 3 * arrays
    assert peak_bytes(outputs.as_dicts) >= 6 * arrays
