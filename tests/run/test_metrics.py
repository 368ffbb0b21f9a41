"""metrics.jsonl: exact numbers, one line per event, no step twice after a resume."""

import json
import math
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.observer import CheckpointSaved, EvaluationFinished, SessionFinished, SessionStarted, StepFinished
from skyrl_engine.errors import EngineError
from skyrl_engine.run.metrics import MetricsJsonl, keep_up_to, metrics_jsonl, read_metrics


def session(directory: Path, first: int, last: int, *, finish: bool = True) -> None:
    observer = metrics_jsonl.skyrl_engine_make_observer()
    observer.skyrl_engine_session_started(SessionStarted(directory, {}, total_steps=9, start_step=first - 1))
    if first == 1:
        observer.skyrl_engine_evaluation_finished(EvaluationFinished(0, {"loss": 3.0}, 0.1))
    for step in range(first, last + 1):
        observer.skyrl_engine_step_finished(StepFinished(step, 9, {"loss": 1 / step}, 0.5, {"model": 0.25}, (5,)))
        observer.skyrl_engine_evaluation_finished(EvaluationFinished(step, {"loss": 2 / step}, 0.1))
        observer.skyrl_engine_checkpoint_saved(CheckpointSaved(step, directory / f"step-{step:08d}"))
    if finish:
        observer.skyrl_engine_session_finished(SessionFinished(last))
    else:
        assert observer._file is not None
        observer._file.close()  # as a killed process does


def steps(path: Path, kind: str = "step") -> list[int]:
    return [record["step"] for record in read_metrics(path) if record["kind"] == kind]


def test_the_engine_offers_it_as_an_observer_plugin() -> None:
    (entry,) = entry_points(group="skyrl_engine.observer", name="metrics_jsonl")
    assert entry.load() is metrics_jsonl


def test_records_of_a_session(tmp_path: Path) -> None:
    session(tmp_path, 1, 2)
    records = read_metrics(tmp_path / "metrics.jsonl")
    kinds = ["session_started", "evaluation", "step", "evaluation", "checkpoint", "step", "evaluation", "checkpoint"]
    assert [record["kind"] for record in records] == [*kinds, "session_finished"]
    assert records[2] == {
        "kind": "step",
        "step": 1,
        "total_steps": 9,
        "seconds": 0.5,
        "metrics": {"loss": 1.0},
        "cpu_seconds": {"model": 0.25},
        "peak_bytes": [5],
    }
    assert records[4]["path"] == "step-00000001"
    assert records[-1]["error"] is None


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b'{"kind": "step", "st',
        b'{"kind": "step", "step": 6}',
        b"\0" * 40 + b"\n",
        b"[1, null]\n",
        b"null\n{}\n",
        b'{"kind": "step"}\n',
    ],
)
def test_a_resume_drops_later_records_and_a_torn_line(tmp_path: Path, tail: bytes) -> None:
    session(tmp_path, 1, 5, finish=False)
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(tail)
    session(tmp_path, 4, 6)
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert steps(path, "evaluation") == [0, 1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in (entry["metrics"] for entry in read_metrics(path) if entry["kind"] == "step")] == [
        1 / step for step in range(1, 7)
    ]


def test_starting_over_keeps_nothing(tmp_path: Path) -> None:
    session(tmp_path, 1, 2, finish=False)
    session(tmp_path, 1, 1)
    assert steps(tmp_path / "metrics.jsonl") == [1]
    assert steps(tmp_path / "metrics.jsonl", "evaluation") == [0, 1]


@given(st.lists(st.floats(), min_size=1, max_size=5))
def test_numbers_keep_every_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    directory = tmp_path_factory.mktemp("metrics")
    observer = MetricsJsonl()
    observer.skyrl_engine_session_started(SessionStarted(directory, {}, 1))
    observer.skyrl_engine_step_finished(StepFinished(1, 1, {str(i): value for i, value in enumerate(values)}, 0.0))
    observer.skyrl_engine_session_finished(SessionFinished(1))
    path = directory / "metrics.jsonl"
    keep_up_to(path, 1)  # rewritten as a resume does
    (record,) = [record for record in read_metrics(path) if record["kind"] == "step"]
    assert record["metrics"] == {str(i): value if math.isfinite(value) else None for i, value in enumerate(values)}
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_record_is_on_its_way_before_the_next_event(tmp_path: Path) -> None:
    session(tmp_path, 1, 1, finish=False)
    observer = MetricsJsonl()
    observer.skyrl_engine_session_started(SessionStarted(tmp_path, {}, 9, start_step=1))
    observer.skyrl_engine_step_finished(StepFinished(2, 9, {}, 0.0))
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
    observer.skyrl_engine_session_finished(SessionFinished(2))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(EngineError, match=r"metrics\.jsonl cannot be written"):
        MetricsJsonl().skyrl_engine_session_started(SessionStarted(tmp_path, {}, 1))


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    observer = MetricsJsonl()
    observer.skyrl_engine_session_started(SessionStarted(tmp_path, {}, 1))
    assert observer._file is not None
    observer._file.close()
    observer._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 - the observer closes it
    with pytest.raises(EngineError, match=r"metrics\.jsonl cannot be written .*No space left on device"):
        observer.skyrl_engine_step_finished(StepFinished(1, 1, {}, 0.0))
    with pytest.raises(EngineError, match="No space left on device"):
        observer.skyrl_engine_session_finished(SessionFinished(1))
    assert observer._file is None
