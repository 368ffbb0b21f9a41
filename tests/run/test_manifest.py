"""run.json: written in one step, plain JSON, one entry per session."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine import __version__
from skyrl_engine.errors import EngineError
from skyrl_engine.run.environment import LIBRARIES, describe_environment
from skyrl_engine.run.manifest import begin_session, end_session, new_manifest, read_manifest, write_manifest

RECORD = {
    "name": "mine",
    "distribution": None,
    "version": None,
    "sha256": "ab",
    "path": "/x/loss.py",
    "source_text": "secret sauce",
}
LOCKS = {"loss": {"record": RECORD, "options": {"gamma": 2.0}}}


def manifest(**changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "plugins": LOCKS,
        "observers": [],
        "config": {"run": {"seed": 3}},
        "origins": {"run.seed": "command line"},
        "seeds": {"run": 3},
        "world": {"ranks": 1},
        "data": {},
        "environment": describe_environment(),
        "extra": {},
    }
    return new_manifest(**{**facts, **changes})


def test_sessions_are_appended_and_completed(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    first = manifest()
    begin_session(first, start_step=0, plugins=LOCKS, changed=[])
    write_manifest(path, first)
    assert read_manifest(path)["sessions"][0]["finished"] is None
    resumed = read_manifest(path)
    begin_session(resumed, start_step=4, plugins=LOCKS, changed=["run.seed: 0 -> 1"])
    end_session(resumed, step=9, error="the disk is full")
    write_manifest(path, resumed)
    sessions = read_manifest(path)["sessions"]
    assert [session["start_step"] for session in sessions] == [0, 4]
    assert sessions[1]["end_step"] == 9
    assert sessions[1]["error"] == "the disk is full"
    assert sessions[1]["changed"] == ["run.seed: 0 -> 1"]
    assert sessions[1]["engine"] == __version__
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_plugin_is_recorded_by_hash_and_options_without_its_source_text() -> None:
    recorded = manifest()["plugins"]["loss"]
    assert recorded["sha256"] == "ab"
    assert recorded["options"] == {"gamma": 2.0}
    assert "source_text" not in recorded


def test_the_environment_names_versions_and_no_host_or_user() -> None:
    environment = describe_environment()
    assert set(environment["libraries"]) == set(LIBRARIES)
    assert environment["python"].count(".") == 2
    assert environment["cpu"]["cores"] >= 1
    assert json.loads(json.dumps(environment)) == environment


@pytest.mark.parametrize("extra", [{"tracker": object()}, {"value": float("nan")}])
def test_an_extra_fact_that_is_no_json_is_refused_and_the_file_stays(tmp_path: Path, extra: dict[str, Any]) -> None:
    path = tmp_path / "run.json"
    write_manifest(path, manifest())
    with pytest.raises(EngineError, match="not JSON"):
        write_manifest(path, manifest(extra=extra))
    assert read_manifest(path)["extra"] == {}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 1}', b'{"format": 1, "sess', b"\xff\x00"])
def test_a_damaged_manifest_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    assert read_manifest(tmp_path / "run.json") is None


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": 99}')
    with pytest.raises(EngineError, match=r"run\.json"):
        read_manifest(tmp_path / "run.json")
