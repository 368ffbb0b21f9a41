"""A run that was killed and resumed, read back by MLflow's client; a server that is not there; the promises of observers."""

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from tracked_runs import TOTAL, assert_no_secret, list_events, make, tell_killed_and_resumed

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.run.observer_calls import ObserverBus
from skyrl_engine.testing import ObserverConformance
from skyrl_engine.testing.observers.sessions import method_of

# for the store of files; the suite of promises makes an observer as it is collected
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
FOLDER = TemporaryDirectory(prefix="skyrl-engine-mlflow-")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def directory(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "mine"
    tell_killed_and_resumed("mlflow", {"uri": store.as_uri(), "table_every": 2}, directory)
    return directory


@pytest.fixture(scope="module")
def client(store: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=store.as_uri())


@pytest.fixture(scope="module")
def run(directory: Path, client: MlflowClient) -> Run:
    experiment = client.get_experiment_by_name("skyrl-engine")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == directory.name
    assert run.info.status == "FINISHED"
    return run


def test_every_step_is_there_once(client: MlflowClient, run: Run) -> None:
    def history(name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]

    assert history("loss") == [(step, 0.5 + step) for step in range(1, TOTAL + 1)]
    assert [step for step, _ in history("evaluation/loss")] == [2, 4, 6]
    assert all(math.isnan(value) for _, value in history("reward/mean"))
    assert len(history("evaluation/avg_1")) == TOTAL


def test_parameters_tags_and_tables(directory: Path, run: Run, store: Path) -> None:
    assert run.data.params["optimizer.learning_rate"] == "0.25"
    assert run.data.params["generator.api_key"] == "(hidden)"
    assert run.data.tags["checkpoint"] == f"{directory}/checkpoints/step-00000006"
    assert run.data.tags["report"] == f"{directory}/report.html"
    tables = sorted(store.rglob("attempts/*.json"))
    assert [path.name for path in tables] == [f"step-{step:08d}.json" for step in (1, 3, 5)]
    assert json.loads(tables[0].read_text())["columns"][:4] == ["environment", "task", "attempt", "reward"]


@pytest.mark.usefixtures("run")
def test_no_secret_is_written(store: Path, directory: Path) -> None:
    assert_no_secret(store)
    assert_no_secret(directory)


def test_a_store_that_is_not_there_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bus = ObserverBus([make("mlflow", {"uri": "nothing://here"})])
    for event in list_events(tmp_path, 0, 2):
        method_of(bus, event)(event)
    assert (
        "lacks session_started of step 0, rollouts_finished of steps 1-2, step_finished of steps 1-2"
        in caplog.records[-1].getMessage()
    )


@pytest.mark.skipif(find_spec("sqlalchemy") is not None, reason="the whole package of MLflow is installed")
@pytest.mark.parametrize(
    ("uri", "words"), [(None, "neither the option uri nor MLFLOW_TRACKING_URI"), ("sqlite:///m.db", "sqlite is a database")]
)
def test_a_database_is_refused_while_planning_without_what_it_needs(
    uri: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UnsupportedError, match=words):
        make("mlflow", {} if uri is None else {"uri": uri})


class TestMlflow(ObserverConformance):
    plugin = "mlflow"
    options: ClassVar[dict[str, Any]] = {"uri": Path(FOLDER.name).as_uri()}
