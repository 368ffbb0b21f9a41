"""Runs of a folder in a few facts each, read from the ends of their files: a folder of long runs is listed at once."""

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import frozen

from skyrl_engine.errors import ConfigError, EngineError, Problem
from skyrl_engine.run.best import Best, collect_extremes, find_best, is_extremes, read_metric
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.lock import look_at_lock
from skyrl_engine.run.manifest import read_manifest
from skyrl_engine.run.metrics import read_evaluations, read_last_evaluation, read_last_step
from skyrl_engine.run.state import RunState, judge_state
from skyrl_engine.workers.listing import count_bytes

_DEPTH = 4
"""Folders below the one that is listed, down to which runs are looked for."""


@frozen
class RunSummary:
    """A run in a few facts. Times are UTC, ISO 8601; `bytes` are those of all files; what is not known is None."""

    path: str
    name: str
    trainer: str | None
    state: RunState
    step: int
    total_steps: int | None
    created: str
    updated: str
    last: Mapping[str, float | None]
    """Metrics of the last step."""
    best: Best | None
    bytes: int


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories in a folder and below it; the folder itself if it is one. Raises ConfigError for what is no folder."""
    if not folder.is_dir():
        raise ConfigError([Problem(str(folder), "is no folder", "Name a folder of runs, or a run directory")])
    return sorted(_walk(folder, _DEPTH, set()))


def _walk(folder: Path, depth: int, seen: set[Path]) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.is_symlink())  # a run is named by its own place
        real = folder.resolve()
    except (OSError, RuntimeError):
        return
    if real in seen:  # by a link
        return
    seen.add(real)
    names = {entry.name for entry in entries}
    if names & {"run.json", "metrics.jsonl"} or names >= {".lock", "run.log"}:
        yield folder
    elif depth:
        for entry in entries:
            path = folder / entry.name
            if not entry.name.startswith(".") and path.is_dir():  # `entry.is_dir` raises for a link to itself
                yield from _walk(path, depth - 1, seen)


def summarize_run(folder: Path) -> RunSummary:
    """Return a run's facts. Whatever is missing or damaged is its state, and no error."""
    directory = RunDirectory(folder)
    run = _read_ends(directory)
    config = run.manifest.get("config")
    times = _list_times(directory)
    metrics = None if run.last is None else run.last.get("metrics")
    return RunSummary(
        str(folder),
        folder.resolve().name,
        str(config.get("trainer", "sft")) if isinstance(config, Mapping) else None,
        run.state,
        run.step,
        run.total_steps,
        str(run.manifest.get("created") or _format_time(times[0])),
        _format_time(times[-1]),
        metrics if isinstance(metrics, dict) else {},
        _read_best(directory.metrics, config),
        count_bytes(folder),
    )


def _read_best(path: Path, config: Any) -> Best | None:
    """Return the best evaluation: as the last one says it or, where an engine wrote it that did not, out of all."""
    evaluation = config.get("evaluation") if isinstance(config, Mapping) else None
    at_ends = isinstance(evaluation, Mapping) and evaluation.get("every") is None
    try:
        last = read_last_evaluation(path, at_ends=at_ends)
        if last is None:
            return None
        stated = last.get("extremes")
        extremes = stated if is_extremes(stated) else collect_extremes(read_evaluations(path))
    except OSError:  # its state says so
        return None
    metric, higher = read_metric(config)
    return find_best(extremes, metric, higher=higher)


def read_state(directory: RunDirectory) -> RunState:
    """Return the state of a run."""
    return _read_ends(directory).state


def read_config(directory: RunDirectory) -> Any:
    """Return the configuration of a run as its manifest has it, None where that cannot be read."""
    return _read_manifest(directory)[0].get("config")


@frozen
class _Ends:
    """The manifest of a run, empty without a readable one, and the last record of a step."""

    manifest: Mapping[str, Any]
    last: Mapping[str, Any] | None
    total_steps: int | None
    state: RunState

    @property
    def step(self) -> int:
        return 0 if self.last is None else int(self.last["step"])


def _read_ends(directory: RunDirectory) -> _Ends:
    manifest, broken = _read_manifest(directory)
    last: Mapping[str, Any] | None = None
    total: int | None = None
    try:
        last, total = read_last_step(directory.metrics)
    except OSError as error:
        broken = broken or RunState("damaged", f"metrics.jsonl cannot be read ({error.strerror})")
    step = 0 if last is None else last["step"]
    lock = look_at_lock(directory.lock_file)
    return _Ends(manifest, last, total, broken or judge_state(manifest.get("sessions", ()), lock, step=step, total_steps=total))


def _read_manifest(directory: RunDirectory) -> tuple[Mapping[str, Any], RunState | None]:
    """Return the manifest, empty without a readable one, and the state of a run that it says nothing of."""
    try:
        manifest = read_manifest(directory.manifest)
    except EngineError as error:
        return {}, RunState("unreadable", error.cause)
    if manifest is None:
        return {}, _explain_missing_manifest(directory)
    if not all(isinstance(session, Mapping) for session in manifest["sessions"]):
        return {}, RunState("damaged", "run.json holds sessions that are none")
    return manifest, None


def _explain_missing_manifest(directory: RunDirectory) -> RunState | None:
    """Return the state of a run whose manifest cannot be read, None where it has not begun yet."""
    if directory.manifest.exists():
        return RunState("damaged", "run.json cannot be read")
    if directory.metrics.exists() or directory.checkpoints.exists():
        return RunState("damaged", "run.json is missing")
    return None


def _list_times(directory: RunDirectory) -> list[float]:
    """Return when the files that say how a run goes were written, the earliest first."""
    times = []
    for path in (directory.path, directory.metrics, directory.log, directory.manifest, directory.lock_file):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return sorted(times) or [0.0]


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
