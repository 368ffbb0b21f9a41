"""A list of runs is there whatever became of one of them."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyrl_engine.errors import ConfigError
from skyrl_engine.run.best import Best
from skyrl_engine.run.summary import find_runs, summarize_run

HOLDER = {"host": "gpu-7", "pid": 12, "since": "2026-01-01T00:00:00+00:00", "work": "run"}
SESSION = {
    "started": "2026-01-01T00:00:00+00:00",
    "start_step": 0,
    "finished": "2026-01-02T00:00:00+00:00",
    "end_step": 2,
    "error": None,
}
FILES = {
    "run.json": json.dumps(
        {"format": 1, "created": "2026", "config": {"trainer": "sft", "evaluation": {"best": "loss"}}, "sessions": [SESSION]}
    ),
    "metrics.jsonl": "".join(
        json.dumps(record) + "\n"
        for record in (
            {"kind": "session_started", "step": 0, "total_steps": 2},
            {"kind": "step", "step": 1, "total_steps": 2, "metrics": {"loss": 2.0}},
            {
                "kind": "evaluation",
                "step": 1,
                "metrics": {"loss": 1.5},
                "extremes": {"loss": {"lowest": [1.5, 1], "highest": [1.5, 1]}},
            },
            {"kind": "step", "step": 2, "total_steps": 2, "metrics": {"loss": 1.0}},
        )
    ),
    ".lock": json.dumps(HOLDER),
}


def write_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_a_whole_run(tmp_path: Path) -> None:
    run = summarize_run(write_run(tmp_path / "run"))
    assert (run.state.word, run.step, run.total_steps, run.best) == ("ended", 2, 2, Best("loss", 1.5, 1))
    assert run.last == {"loss": 1.0}
    assert run.bytes == sum(len(text) for text in FILES.values())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2)
)


@pytest.mark.parametrize("extremes", [5, {"loss": 5}, {"loss": {"lowest": [1.0]}}, {"loss": {"lowest": 1, "highest": None}}])
def test_extremes_that_are_none_are_computed_again(tmp_path: Path, extremes: object) -> None:
    run = write_run(tmp_path / "run")
    evaluation = json.dumps({"kind": "evaluation", "step": 2, "metrics": {"loss": 9.0}, "extremes": extremes})
    (run / "metrics.jsonl").write_text(FILES["metrics.jsonl"] + evaluation + "\n")
    assert summarize_run(run).best == Best("loss", 1.5, 1)


@pytest.mark.parametrize("line", ['{"kind": "step", "step": ' + "[" * 100_000, '{"kind": "step", "step": 3, "total_steps": "x"}'])
def test_a_damaged_line_is_none(tmp_path: Path, line: str) -> None:
    """Nesting is deeper than Python reads; a total that is no number would be compared with the step."""
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(FILES["metrics.jsonl"] + line + "\n")
    summary = summarize_run(run)
    assert (summary.step, summary.total_steps, summary.state.word) == (2, 2, "ended")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(FILES)), st.data())
def test_no_damage_keeps_a_list_from_being_shown(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """Bytes that are others, cut or more; and whole JSON with another value in the place of one of its values."""
    run, text = write_run(tmp_path / "run"), FILES[name]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        damaged = text[:at].encode() + data.draw(st.binary(max_size=3)) + text[at + data.draw(st.integers(0, len(text))) :].encode()
    else:
        lines = [json.loads(line) for line in text.splitlines()]
        table = lines[data.draw(st.integers(0, len(lines) - 1))]
        while True:
            key = data.draw(st.sampled_from(list(table) if isinstance(table, dict) else range(len(table))))
            if not isinstance(table[key], dict | list) or data.draw(st.booleans()):
                table[key] = data.draw(VALUES)
                break
            table = table[key]
        damaged = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (run / name).write_bytes(damaged)
    summary = summarize_run(run)
    assert summary.name == "run"
    assert str(summary.state)


def test_runs_are_found_below_a_folder_and_not_in_each_other(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "sweep" / "one" / "b")]
    write_run(tmp_path / "a" / "copy")
    (tmp_path / "other").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / "again").symlink_to(runs[0])
    assert find_runs(tmp_path) == runs
    assert find_runs(runs[0]) == [runs[0]]
    with pytest.raises(ConfigError, match="is no folder"):
        find_runs(tmp_path / "absent")
