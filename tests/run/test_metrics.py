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
from skyrl_engine.run.follow import MetricsFollower
from skyrl_engine.run.metrics import (
    MetricsJsonl,
    keep_up_to,
    metrics_jsonl,
    read_evaluations,
    read_last_evaluation,
    read_last_step,
    read_metrics,
)


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


@given(
    st.lists(st.tuples(st.sampled_from(["step", "evaluation", "checkpoint", "damaged"]), st.integers(0, 400)), max_size=12),
    st.sampled_from([b"", b'{"kind": "step", "st', b'{"kind": "evaluation", "step": 9']),
    st.sampled_from([16, 64, 1 << 16]),
)
def test_the_ends_of_a_file_tell_what_reading_all_of_it_does(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, int]], tail: bytes, block: int
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    lines = [
        json.dumps(
            {"kind": kind, "step": step, "total_steps": 20, "metrics": {"loss": step / 2, "none": None}, "text": "x" * width}
        )
        if kind != "damaged"
        else "\0" * width
        for step, (kind, width) in enumerate(kinds)
    ]
    path.write_bytes("".join(line + "\n" for line in lines).encode() + tail)
    records = read_metrics(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl_engine.run.metrics._BLOCK", block)
        last, total = read_last_step(path)
    expected = [record for record in records if record["kind"] == "step"]
    assert last == (expected[-1] if expected else None)
    assert total == (20 if expected else None)
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert read_evaluations(path) == {record["step"]: {"loss": record["metrics"]["loss"]} for record in evaluations}
    for at_ends in (True, False):
        assert read_last_evaluation(path, at_ends=at_ends) == (evaluations[-1] if evaluations else None)


def test_an_evaluation_says_the_extremes_so_far_also_after_a_resume(tmp_path: Path) -> None:
    session(tmp_path, 1, 3, finish=False)
    last = read_last_evaluation(tmp_path / "metrics.jsonl", at_ends=True)
    assert last is not None
    assert last["extremes"] == {"loss": {"lowest": [2 / 3, 3], "highest": [3.0, 0]}}
    session(tmp_path, 2, 2)  # goes on after step 1: what came later counts no more
    last = read_last_evaluation(tmp_path / "metrics.jsonl", at_ends=False)
    assert last is not None
    assert last["extremes"] == {"loss": {"lowest": [1.0, 2], "highest": [3.0, 0]}}


def test_a_follower_reads_each_record_once_and_begins_again_where_a_session_wrote_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.read_new() == (False, [])
    session(tmp_path, 1, 3, finish=False)
    assert follower.read_new() == (False, read_metrics(path))
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "step": 4')
        file.flush()
        assert follower.read_new() == (False, [])
        file.write(b"}\n")
    assert follower.read_new() == (False, [{"kind": "step", "step": 4}])
    session(tmp_path, 2, 2)
    assert follower.read_new() == (True, read_metrics(path))
