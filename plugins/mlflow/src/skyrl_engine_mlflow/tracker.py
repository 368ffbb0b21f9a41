"""A run in MLflow: metrics, parameters, tags and tables as artifacts, through its client."""

import os
import re
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import min_len, optional

from skyrl_engine import UnsupportedError
from skyrl_engine.tracking import TrackedRun, TrackedTable, Tracker, TrackerOptions

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARAMETERS_AT_ONCE = 100
"""Parameters that a server takes in one request."""

SECONDS = ("evaluation/seconds", "seconds")
"""Metrics that every evaluation, and every step, has; sent last, they say that the others are there."""

_NO_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_FOR_DATABASES = ("sqlalchemy", "alembic")
"""Modules that the whole package of MLflow brings, and mlflow-skinny does not."""


@frozen(kw_only=True)
class MlflowOptions(TrackerOptions):
    """Options of `mlflow`."""

    uri: str | None = field(default=None, validator=optional(min_len(1)))
    """Address of the tracking server or store; none: MLFLOW_TRACKING_URI, else MLflow's own default."""

    experiment: str = field(default="skyrl-engine", validator=min_len(1))
    """Experiment of the run, which is made where there is none."""


class MlflowTracker(Tracker):
    """Sends a run through MLflow's client. A step is one request, answered before `log_metrics` returns."""

    name: ClassVar[str] = "mlflow"

    def __init__(self, options: MlflowOptions) -> None:
        _refuse_missing_database(options.uri)
        super().__init__(options)
        self._wanted = options

    def open(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        self._client = _make_client(self._wanted.uri)
        if run.run_id is not None:
            self._client.update_run(run.run_id, status="RUNNING")
            self._id = run.run_id
            return self._id
        known = self._client.get_experiment_by_name(self._wanted.experiment)
        experiment = self._client.create_experiment(self._wanted.experiment) if known is None else known.experiment_id
        self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        parameters = [Param(_rename(key), str(value)) for key, value in run.config.items()]
        for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._id, params=parameters[first : first + PARAMETERS_AT_ONCE])
        return self._id

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        last = _name_of_seconds(metrics)
        names = [*(name for name in metrics if name != last), last]
        self._client.log_batch(self._id, metrics=[Metric(_rename(name), metrics[name], now, step) for name in names])

    def log_table(self, step: int, name: str, table: TrackedTable) -> None:
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self._id, content, f"{name}/step-{step:08d}.json")

    def log_path(self, step: int, name: str, path: Path) -> None:  # noqa: ARG002 - tags have no steps
        self._client.set_tag(self._id, name, str(path))

    def close(self, error: str | None) -> None:
        if error is not None:
            self._client.set_tag(self._id, "error", error)
        self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")

    def holds(self, step: int, metrics: Mapping[str, float]) -> bool:
        history = self._client.get_metric_history(self._id, _name_of_seconds(metrics))
        return any(metric.step == step for metric in history)


def _refuse_missing_database(uri: str | None) -> None:
    """Raise UnsupportedError for a store in a database where MLflow's modules for databases are not installed."""
    if all(find_spec(module) for module in _FOR_DATABASES):
        return
    named = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if named is None and not Path("mlruns").is_dir():
        cause = "neither the option uri nor MLFLOW_TRACKING_URI is set, and MLflow's own default, a database here, needs the whole package"
    elif named is not None and named.startswith(_DATABASES):
        cause = f"{named.partition(':')[0]} is a database, for which MLflow needs the whole package"
    else:
        return
    raise UnsupportedError(
        f"{cause}: mlflow-skinny alone is installed",
        remedy="Set uri of [observers.mlflow] to a tracking server, or `pip install mlflow`",
    )


def _make_client(uri: str | None) -> "MlflowClient":
    """Return a client, without the thread that reports to MLflow's makers how it is used."""
    before = os.environ.get(_NO_TELEMETRY)
    os.environ[_NO_TELEMETRY] = "true"
    try:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=uri)
    finally:
        if before is None:
            del os.environ[_NO_TELEMETRY]
        else:
            os.environ[_NO_TELEMETRY] = before


def _name_of_seconds(metrics: Mapping[str, float]) -> str:
    return next(name for name in SECONDS if name in metrics)


def _rename(name: str) -> str:
    """Return a name as MLflow takes it: `evaluation/avg@1` becomes `evaluation/avg_1`."""
    return re.sub(r"[^\w\-. :/]", "_", name)
