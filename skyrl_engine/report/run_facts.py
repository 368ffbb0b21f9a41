"""A run as its directory tells it: the manifest says what it was, the metrics how it went."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl_engine.errors import ConfigError, EngineError, Problem
from skyrl_engine.report.series import MetricsTable, read_table
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.manifest import read_manifest

CHOSEN = "default"
"""Origin of a key that nobody set."""


@frozen(eq=False)
class RunFacts:
    """A run as its directory tells it. `name` is the folder's."""

    directory: RunDirectory
    name: str
    manifest: Mapping[str, Any]
    metrics: MetricsTable

    @property
    def trainer(self) -> str:
        return str(self.manifest["config"].get("trainer", "sft"))

    @property
    def state(self) -> str:
        """Say how far the run is, in words: the last session's end, or that none was recorded."""
        sessions = self.manifest["sessions"]
        last = sessions[-1] if sessions else {}
        step, total = last.get("end_step") or self.metrics.last_step, self.metrics.total_steps
        place = f"step {step:,}" if total is None else f"step {step:,} of {total:,}"
        if last.get("error"):
            return f"failed at {place}: {last['error']}"
        if last.get("finished"):
            return f"ended at {place}" if total is not None and step >= total else f"stopped at {place}"
        return f"{place}; no end is recorded: it runs, or was killed"

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
    return RunFacts(directory, folder.resolve().name, manifest, read_table(directory.metrics))


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
