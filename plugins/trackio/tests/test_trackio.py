"""A run that was killed and resumed, read back from Trackio's database. `nox -s trackio`: its requirements do not stand in the lock."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tracked_runs import TOTAL, assert_no_secret, tell_killed_and_resumed

FOLDER = TemporaryDirectory(prefix="skyrl-engine-trackio-")
os.environ["TRACKIO_DIR"] = FOLDER.name  # read once, when the package is imported

trackio = pytest.importorskip("trackio")

from skyrl_engine.testing import ObserverConformance  # noqa: E402 - after the variable


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "mine"
    tell_killed_and_resumed("trackio", {"project": "read-back", "table_every": 2}, directory)
    return directory


@pytest.fixture(scope="module")
def rows(directory: Path) -> list[dict[str, Any]]:
    [run] = trackio.Api().runs("read-back")
    assert run.name == json.loads((directory / "trackers" / "trackio.json").read_text())["run_id"]
    assert run.config["optimizer.learning_rate"] == 0.25
    assert run.config["generator.api_key"] == "(hidden)"
    return trackio.SQLiteStorage.get_logs("read-back", run.name)


def test_every_step_is_there_once(rows: list[dict[str, Any]]) -> None:
    steps = [row for row in rows if row.get("seconds") is not None]
    assert [(row["step"], row["loss"]) for row in steps] == [(step, 0.5 + step) for step in range(1, TOTAL + 1)]
    assert [row["step"] for row in rows if "evaluation/loss" in row] == [2, 4, 6]


def test_tables_and_paths(rows: list[dict[str, Any]], directory: Path) -> None:
    assert {row["step"] for row in rows if "attempts" in row} <= {1, 3, 5}
    assert 5 in {row["step"] for row in rows if "attempts" in row}
    assert {row["step"] for row in rows if "checkpoint" in row} == {2, 4, 6}
    assert str(directory / "checkpoints" / "step-00000006") in json.dumps(rows)


@pytest.mark.usefixtures("rows")
def test_no_secret_is_written(directory: Path) -> None:
    assert_no_secret(directory)
    assert_no_secret(Path(FOLDER.name))


class TestTrackio(ObserverConformance):
    plugin = "trackio"
