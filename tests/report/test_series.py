"""Metrics as columns, and curves that are shortened: means, extremes and positions are those of the values."""

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.report.series import Series, read_table, shorten


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 40))
def test_a_shortened_curve_has_the_means_and_extremes_of_its_parts(values, points):
    steps = np.arange(1, len(values) + 1, dtype=np.int64) * 3
    curve = shorten(Series(steps, np.asarray(values)), points)
    assert len(curve.steps) <= points
    parts = [values[begin : begin + curve.width] for begin in range(0, len(values), curve.width)]
    assert len(parts) == len(curve.values)
    for part, step, mean, low, high in zip(parts, curve.steps, curve.values, curve.lowest, curve.highest, strict=True):
        assert math.isclose(mean, sum(part) / len(part), rel_tol=1e-9, abs_tol=1e-6)
        assert (low, high) == (min(part), max(part))
        assert 3 <= step <= 3 * len(values)


def test_numbers_that_some_steps_lack_or_that_are_not_finite_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [
        {"kind": "session_started", "step": 0, "total_steps": 3},
        {"kind": "evaluation", "step": 0, "seconds": 1, "metrics": {"loss": 5.0}},
        {
            "kind": "step",
            "step": 1,
            "total_steps": 3,
            "seconds": 0.5,
            "metrics": {"loss": 4.0, "rare": 1},
            "cpu_seconds": {"model": 2},
            "peak_bytes": [7, 0, 9],
        },
        {"kind": "step", "step": 2, "total_steps": 3, "seconds": None, "metrics": {"loss": None}, "cpu_seconds": {}},
        {"kind": "checkpoint", "step": 2, "path": "step-00000002"},
        {"kind": "step", "step": 3, "total_steps": 3, "seconds": 0.25, "metrics": {"loss": 3.0}},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "step", "st')
    table = read_table(path)
    shown = {name: (series.steps.tolist(), series.values.tolist()) for name, series in table.steps.items()}
    assert shown == {
        "loss": ([1, 3], [4.0, 3.0]),
        "rare": ([1], [1.0]),
        "seconds": ([1, 3], [0.5, 0.25]),
        "memory/rank 0": ([1], [7.0]),
        "memory/rank 2": ([1], [9.0]),
    }
    assert table.spans["model"].values.tolist() == [2.0]
    assert table.evaluations["loss"].steps.tolist() == [0]
    assert (table.checkpoints, table.last_step, table.total_steps) == ((2,), 3, 3)
