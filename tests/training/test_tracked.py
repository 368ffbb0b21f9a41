"""A real run in TensorBoard: interrupted, resumed, and the same numbers as in metrics.jsonl; and a tracker that cannot write."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from skyrl_engine import hookimpl
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]
OBSERVERS = {"observers": ["metrics_jsonl", "tensorboard"]}


class Fails:
    """Ends the run after step 5, as an observer that fails does."""

    @hookimpl
    def skyrl_engine_step_finished(self, event):
        if event.step == 5:
            raise RuntimeError("pulled the plug")


def test_an_interrupted_run_is_one_curve(configure: Configure) -> None:
    settings = {
        "run": OBSERVERS,
        "training": {"steps": 7},
        "evaluation": {"every": 2},
        "observers": {"tensorboard": {"on_error": "stop"}},
    }
    with pytest.raises(Exception, match="pulled the plug"):
        run_sft(configure("run", **settings), observers=[Fails()])
    directory = run_sft(configure("run", **settings, checkpoint={"resume": True})).directory
    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    records = read_metrics(directory / "metrics.jsonl")
    for kind, tag in (("step", "loss"), ("evaluation", "evaluation/loss")):
        numbers = [(record["step"], as_single(record["metrics"]["loss"])) for record in records if record["kind"] == kind]
        assert sorted((event.step, event.value) for event in events.Scalars(tag)) == numbers
    assert {event.step for event in events.Tensors("checkpoint")} >= {3, 6}


def as_single(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


def test_a_tracker_that_cannot_write_stops_nothing(configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a_file").write_text("in the way")
    tables = {"tensorboard": {"directory": str(tmp_path / "a_file")}}
    result = run_sft(configure("run", run=OBSERVERS, training={"steps": 2}, evaluation={"at_end": False}, observers=tables))
    assert result.step == 2
    [first, last] = [
        record.getMessage() for record in caplog.records if "tensorboard" in record.getMessage() and record.levelname == "WARNING"
    ]
    assert "failed in skyrl_engine_session_started: NotADirectoryError" in first
    assert (
        "lacks session_started of step 0, step_finished of steps 1-2, checkpoint_saved of step 2, session_finished of step 2"
        in last
    )
