"""A run as its directory tells it: the manifest says what it was, the metrics how it went."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl_engine.errors import ConfigError, EngineError, Problem
from skyrl_engine.report.series import MetricsTable, read_table
from skyrl_engine.run.best import Best, collect_extremes, find_best, read_metric
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.lock import look_at_lock
from skyrl_engine.run.manifest import read_manifest
from skyrl_engine.run.state import RunState, judge_state

CHOSEN = "default"
"""Origin of a key that nobody set."""


@frozen(eq=False)
class RunFacts:
    """A run as its directory tells it. `name` is the folder's."""

    directory: RunDirectory
    name: str
    manifest: Mapping[str, Any]
    metrics: MetricsTable
    state: RunState

    @property
    def trainer(self) -> str:
        return str(self.manifest["config"].get("trainer", "sft"))

    @property
    def step(self) -> int:
        """The last step: by the last session's end, or by the metrics of one that has not ended."""
        sessions = self.manifest["sessions"]
        return int((sessions[-1] if sessions else {}).get("end_step") or self.metrics.last_step)

    def describe_state(self) -> str:
        """Say how far the run is, in words: the last session's end, or whether a process works on it."""
        total = self.metrics.total_steps
        place = f"step {self.step:,}" if total is None else f"step {self.step:,} of {total:,}"
        if self.state.word in ("ended", "stopped", "failed"):
            return f"{self.state.word} at {place}{'' if self.state.cause is None else f': {self.state.cause}'}"
        return f"{place}; {self.state}"

    def list_last_metrics(self) -> dict[str, float]:
        """Return the metrics of the last step, and of the last evaluation under `held-out/` where a step has one of that name."""
        steps = {
            name: float(series.values[-1])
            for name, series in self.metrics.steps.items()
            if series.steps[-1] == self.metrics.last_step
        }
        last = max((int(series.steps[-1]) for series in self.metrics.evaluations.values()), default=None)
        held_out = {name: float(series.values[-1]) for name, series in self.metrics.evaluations.items() if series.steps[-1] == last}
        return {**steps, **{f"held-out/{name}" if name in steps else name: value for name, value in held_out.items()}}

    def list_evaluations(self) -> dict[int, dict[str, float]]:
        """Return the numbers of every evaluation by step."""
        evaluations: dict[int, dict[str, float]] = {}
        for name, series in self.metrics.evaluations.items():
            for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
                evaluations.setdefault(step, {})[name] = value
        return evaluations

    @property
    def best(self) -> Best | None:
        """The best evaluation, None without one, or where nothing says which one that is."""
        metric, higher = read_metric(self.manifest["config"])
        return find_best(collect_extremes(self.list_evaluations()), metric, higher=higher)

    @property
    def seconds(self) -> float:
        """Wall seconds of all steps."""
        series = self.metrics.steps.get("seconds")
        return 0.0 if series is None else float(series.values.sum())

    @property
    def tokens(self) -> int:
        """Tokens of all steps, without padding."""
        series = self.metrics.steps.get("tokens")
        return 0 if series is None else int(series.values.sum())

    def list_plugins(self) -> list[tuple[str, str]]:
        """Return the plugins, observers among them, by kind: `distribution:name version`."""
        plugins = self.manifest["plugins"]
        rows = [(kind, _format_plugin(facts)) for kind, facts in plugins.items()]
        return [*rows, *(("observer", _format_plugin(facts)) for facts in self.manifest["observers"])]

    def list_settings(self) -> list[tuple[str, str, str]]:
        """Return the keys of the configuration that are not at their defaults: key, value, and where it comes from."""
        origins = self.manifest["origins"]
        values = dict(_flatten(self.manifest["config"]))
        return [(key, _format(values[key]), str(origins[key])) for key in values if origins.get(key, CHOSEN) != CHOSEN]

    def flatten_config(self) -> dict[str, str]:
        """Return all of the configuration by dotted key."""
        return {key: _format(value) for key, value in _flatten(self.manifest["config"])}

    def list_data(self) -> list[tuple[str, str]]:
        """Return what the manifest says of the data, by dotted key."""
        return [(key, _format(value)) for key, value in _flatten(self.manifest["data"])]

    def list_environment(self) -> list[tuple[str, str]]:
        """Return versions, platform and devices, by dotted key."""
        return [(key, _format(value)) for key, value in _flatten(self.manifest["environment"])]


def read_run(folder: Path) -> RunFacts:
    """Read a run directory. Raises ConfigError for a folder that is none, or whose run never started, and EngineError for one of another
    format.
    """
    directory = RunDirectory(folder)
    if not folder.is_dir():
        raise ConfigError([Problem(str(folder), "is no folder", "Name a run directory, such as one under runs/")])
    if not directory.manifest.is_file():
        cause = "holds no run that started: there is no run.json in it"
        raise ConfigError([Problem(str(folder), cause, "Name a run directory, such as one under runs/")])
    manifest = read_manifest(directory.manifest)
    if manifest is None:
        raise EngineError(
            f"{directory.manifest} is damaged", remedy="Put the file back from a copy; resuming the run writes it anew"
        )
    missing = [
        key for key in ("config", "plugins", "observers", "origins", "data", "environment", "sessions") if key not in manifest
    ]
    if missing:
        raise EngineError(f"{directory.manifest} lacks {missing[0]!r}", remedy="Put the file back from a copy")
    metrics = read_table(directory.metrics)
    lock = look_at_lock(directory.lock_file)
    state = judge_state(manifest["sessions"], lock, step=metrics.last_step, total_steps=metrics.total_steps)
    return RunFacts(directory, folder.resolve().name, manifest, metrics, state)


def _format_plugin(facts: Mapping[str, Any]) -> str:
    version = "" if facts.get("version") is None else f" {facts['version']}"
    return f"{facts.get('distribution') or facts.get('path')}:{facts.get('name')}{version}"


def _flatten(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for place, each in enumerate(value):
                yield from _flatten(each, f"{name}[{place}].")
        else:
            yield name, value


def _format(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_format, value)) if value else "none"
    return "none" if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
