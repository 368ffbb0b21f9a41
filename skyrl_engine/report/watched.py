"""A run as it goes on, seen from another process: it reads what the run writes, and asks nothing of it."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

from skyrl_engine.contracts.kinds.observer import EvaluationFinished, SessionStarted, StepFinished
from skyrl_engine.contracts.values.rollout import Trajectory
from skyrl_engine.errors import ConfigError, EngineError, Problem
from skyrl_engine.report.series import Series, TableBuilder
from skyrl_engine.rollout.records import Entry
from skyrl_engine.rollout.segments import read_segment, segments_of
from skyrl_engine.rollout.texts import Decode, decoder_of
from skyrl_engine.run.best import Best, Extremes, find_best, read_metric, update_extremes
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.follow import MetricsFollower
from skyrl_engine.run.progress import Progress, ProgressObserver
from skyrl_engine.run.state import RunState
from skyrl_engine.run.summary import read_config, read_state

_SHARE = 0.05
"""Largest share of the time that reading rollouts takes."""


@define(eq=False)
class WatchedRun:
    """A run that is followed. Made by `watch_run`; `refresh` takes what is new. `listener` gets the progress after every event."""

    directory: RunDirectory
    state: RunState
    listener: Callable[[Progress], object] = field(default=lambda _: None)
    table: TableBuilder = field(factory=TableBuilder, init=False)
    progress: Progress = field(factory=lambda: Progress(0, 0), init=False)
    attempts: list[tuple[str, Trajectory]] = field(factory=list, init=False)
    """The last attempts that ended, the newest first, with the names of their tasks."""
    _extremes: Extremes = field(factory=dict, init=False)
    _config: object = field(default=None, init=False)
    _follower: MetricsFollower = field(init=False)
    _observer: ProgressObserver = field(init=False)
    _decode: Decode | None = field(default=None, init=False)
    _attempts_due: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self._follower = MetricsFollower(self.directory.metrics)
        self._observer = ProgressObserver(self._take_progress)

    @property
    def is_over(self) -> bool:
        """True where nothing more will come: no process works on the run, or none began."""
        return not self.state.is_live and self.state.word != "unknown"

    @property
    def best(self) -> Best | None:
        """The best evaluation, None without one."""
        metric, higher = read_metric(self._config)
        return find_best(self._extremes, metric, higher=higher)

    def refresh(self, attempts: int = 0) -> None:
        """Take what the run has written since the last call, and its last `attempts`. Raises OSError."""
        self.state = read_state(self.directory)  # before the records: nothing comes after those that are read once it is over
        if self._config is None:
            self._config = read_config(self.directory)
        again, records = self._follower.read_new()
        if again:
            self.table, self._extremes = TableBuilder(), {}
            self._observer = ProgressObserver(self._take_progress)
        for record in records:
            self.table.add(record)
            self._tell(record)
        if attempts and time.monotonic() >= self._attempts_due:
            begun = time.monotonic()
            self.attempts = self._read_attempts(attempts)
            self._attempts_due = time.monotonic() + (time.monotonic() - begun) / _SHARE

    def read_series(self, name: str) -> Series | None:
        """Return a metric of steps, or of evaluations where no step has it, so far."""
        column = self.table.steps.get(name, self.table.evaluations.get(name))
        return None if column is None else column.to_series()

    def decode(self, token_ids: Any) -> str:
        """Return the text of token ids; the ids where the run has no tokenizer."""
        if self._decode is None:
            decode, _ = decoder_of(self.directory)
            self._decode = decode or (lambda ids: " ".join(str(int(token_id)) for token_id in ids))
        return self._decode(token_ids)

    def _take_progress(self, progress: Progress) -> None:
        self.progress = progress
        self.listener(progress)

    def _tell(self, record: Mapping[str, Any]) -> None:
        """Tell the observer of progress what a record says, as the run told its own."""
        step, total = record["step"], record.get("total_steps", self.table.total_steps) or 0
        numbers = record.get("metrics")
        metrics = (
            {name: value for name, value in numbers.items() if isinstance(value, int | float)} if isinstance(numbers, dict) else {}
        )
        if record["kind"] == "session_started":
            self._observer.skyrl_engine_session_started(SessionStarted(self.directory.path, {}, total, step))
        elif record["kind"] == "step":
            self._observer.skyrl_engine_step_finished(StepFinished(step, total, metrics, record.get("seconds") or 0.0))
        elif record["kind"] == "evaluation":
            update_extremes(self._extremes, step, metrics)
            self._observer.skyrl_engine_evaluation_finished(EvaluationFinished(step, metrics, record.get("seconds") or 0.0))

    def _read_attempts(self, count: int) -> list[tuple[str, Trajectory]]:
        """Read the last attempts of the newest segments, the best of each group; none where nothing can be read yet."""
        chosen: list[tuple[str, Trajectory]] = []
        try:
            for path in segments_of(self.directory.rollouts)[:-3:-1]:
                entries: list[Entry] = [entry for entry in read_segment(path).entries if entry.event == "group"]
                for entry in reversed(entries[-count + len(chosen) :]):
                    group = entry.group()
                    ended = max(group.finished, key=lambda attempt: attempt.reward, default=None)
                    if ended is not None:
                        chosen.append((f"{group.environment}: task {group.task_key}, best of {len(group.trajectories)}", ended))
                if len(chosen) >= count:
                    break
        except EngineError:  # a segment that is being written, deleted or mended; the next look finds it whole
            return chosen
        return chosen[:count]


def watch_run(folder: Path, listener: Callable[[Progress], object] = lambda _: None) -> WatchedRun:
    """Return a run to follow. Raises ConfigError for what is no run directory."""
    directory = RunDirectory(folder)
    if not folder.is_dir() or not any(path.exists() for path in (directory.manifest, directory.lock_file, directory.metrics)):
        raise ConfigError(
            [Problem(str(folder), "is no run directory", "Name one, such as one that `skyrl-engine runs list` shows")]
        )
    return WatchedRun(directory, read_state(directory), listener)
