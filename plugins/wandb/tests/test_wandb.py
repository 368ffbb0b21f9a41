"""Offline files of a run that was killed and resumed, read back with W&B's own messages; a server that does not answer; the promises."""

import math
import socket
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tracked_runs import CONFIG, TOTAL, assert_no_secret, list_events, make, tell_killed_and_resumed

from skyrl_engine.run.observer_calls import ObserverBus
from skyrl_engine.testing import ObserverConformance
from skyrl_engine.testing.observers.sessions import method_of
from skyrl_engine_wandb.offline_files import read_history


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "mine"
    tell_killed_and_resumed("wandb", {"mode": "offline", "table_every": 2}, directory)
    return directory


@pytest.fixture(scope="module")
def history(run: Path) -> list[dict[str, Any]]:
    return list(read_history(run / "wandb"))


def test_every_step_is_there_once(history: list[dict[str, Any]]) -> None:
    steps = [row for row in history if "seconds" in row]
    assert [(row["step"], row["loss"]) for row in steps] == [(step, 0.5 + step) for step in range(1, TOTAL + 1)]
    assert all(math.isnan(float(row["reward/mean"])) for row in steps)
    assert [row["step"] for row in history if "evaluation/loss" in row] == [2, 4, 6]


def test_tables_are_files(run: Path, history: list[dict[str, Any]]) -> None:
    """Those of a killed session may be lost with what W&B's process had in memory, and do not stand in metrics.jsonl."""
    steps = [row["step"] for row in history if any(key.startswith("attempts") for key in row)]
    assert steps[-1] == 5
    assert set(steps) <= {1, 3, 5}
    assert len(set(steps)) == len(steps) <= len(list(run.rglob("attempts*.table.json")))


def test_it_is_one_run_with_its_configuration_and_without_secrets(run: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    from skyrl_engine_wandb.offline_files import _read_messages

    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    records = [Record.FromString(message) for file in files for message in _read_messages(file.read_bytes())]
    runs = [record.run for record in records if record.HasField("run")]
    assert len(files) == 2
    assert len({each.run_id for each in runs}) == 1
    config = {item.key: item.value_json for item in runs[0].config.update}
    assert config["optimizer.learning_rate"] == str(CONFIG["optimizer"]["learning_rate"])
    assert config["generator.api_key"] == '"(hidden)"'
    summary = {item.key: item.value_json for record in records if record.HasField("summary") for item in record.summary.update}
    assert summary["checkpoint"] == f'"{run}/checkpoints/step-00000006"'
    assert summary["report"] == f'"{run}/report.html"'
    assert_no_secret(run)


def test_nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    bus = ObserverBus([make("wandb", {"mode": "online"})])
    for event in list_events(tmp_path, 0, 1):
        method_of(bus, event)(event)
    assert "nobody is logged in to W&B here" in caplog.records[-1].getMessage()


class TestWandb(ObserverConformance):
    plugin = "wandb"
    options: ClassVar[dict[str, Any]] = {"mode": "offline"}


@pytest.mark.nightly  # W&B's process is given up on, and lives on for a while
def test_a_server_that_does_not_answer_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        bus = ObserverBus([make("wandb", {"mode": "online", "finish_seconds": 1.0})])
        begun = time.monotonic()
        for event in list_events(tmp_path, 0, TOTAL):
            method_of(bus, event)(event)
        assert time.monotonic() - begun < 15
    assert "lacks session_started of step 0" in caplog.records[-1].getMessage()
