"""The base of observers that send a run to a tracker. Invariants, which tests carry by these names:

once       no part of a step is sent twice, whatever was killed when: `Cursor` holds the last one that was sent, and of the one after it,
           which a killed process may have sent, the tracker is asked.
whole      what was not sent before a kill is sent by the session that resumes, from metrics.jsonl or as the run repeats it.
no secret  whatever is sent has passed `flatten_config` or `hide_secrets`.

    session started ──► open ──► what metrics.jsonl has and the tracker lacks ──► steps, evaluations, tables, paths ──► close
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen

from skyrl_engine import hookimpl
from skyrl_engine.cleanup import close_after
from skyrl_engine.contracts.kinds.observer import (
    CheckpointSaved,
    EvaluationFinished,
    OnError,
    RolloutsFinished,
    SessionFinished,
    SessionStarted,
    StepFinished,
)
from skyrl_engine.rollout.texts import decoder_of
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.metrics import iterate_metrics
from skyrl_engine.tracking.cursor import BEFORE_ALL, FOLDER, Cursor, Part, SentPosition
from skyrl_engine.tracking.flat_config import Flat, flatten_config, hide_secrets
from skyrl_engine.tracking.options import TrackerOptions
from skyrl_engine.tracking.tables import TrackedTable, tabulate_attempts

EVALUATION = "evaluation/"


@frozen
class TrackedRun:
    """The run that a tracker opens. `config` is flat and has no secrets.

    `run_id` is what `open` returned in an earlier session, and `sent_step` the last step of which anything was sent; None and -1 in the first.
    """

    directory: Path
    name: str
    config: Flat
    run_id: str | None
    sent_step: int


class Tracker(ABC):
    """Sends metrics, configuration, tables of attempts and paths of checkpoints to a tracker. Subclasses say how; their methods may be slow.

    `name` is that of the plugin, which its cursor in the run directory is called by. `options` are the tracker's own. Attributes of this class
    that are not for subclasses begin with two underscores, so that names of theirs cannot meet them.
    """

    name: ClassVar[str]
    on_error: OnError = "warn"

    def __init__(self, options: TrackerOptions) -> None:
        self.options = options
        self.finish_seconds = options.finish_seconds
        self.__is_closed = False

    @abstractmethod
    def open(self, run: TrackedRun) -> str:
        """Begin a tracked run, or go on with the one called `run.run_id`, and return its id."""

    @abstractmethod
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send numbers of a step, which may be NaN or infinite. A kill after the return should not lose them."""

    @abstractmethod
    def log_table(self, step: int, name: str, table: TrackedTable) -> None:
        """Send a table of a step; one that is sent again takes the place of the first."""

    @abstractmethod
    def log_path(self, step: int, name: str, path: Path) -> None:
        """Send the path of a file or folder of the run, as a reference; one that is sent again takes the place of the first."""

    @abstractmethod
    def close(self, error: str | None) -> None:
        """End the tracked run, as failed where there is an error, and whatever the tracker started in this process."""

    @abstractmethod
    def holds(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return True if the tracked run has these numbers of the step. Asked after a kill, of the first that are not known to be sent."""

    def last_step(self) -> int | None:
        """Return the last step that an opened run holds, -1 for none, where a kill can lose what was taken; None: nothing is lost."""
        return None

    @hookimpl
    def skyrl_engine_session_started(self, event: SessionStarted) -> None:
        self.__directory = RunDirectory(event.directory)
        self.__cursor = Cursor.read(event.directory / FOLDER / f"{self.name}.json")
        sent, run_id = self.__cursor.position, self.__cursor.run_id
        config = event.manifest.get("config", {})
        name = event.directory.resolve().name
        self.__cursor.run_id = self.open(TrackedRun(event.directory, name, flatten_config(config), run_id, sent.step))
        try:
            self.__begin(event, run_id, sent, reports=bool(config.get("run", {}).get("report")))
        except BaseException as error:
            # where the run goes on, nobody tells it the session's end
            self.__is_closed, cause = True, hide_secrets(str(error))
            close_after(error, lambda: self.close(cause))
            raise

    def __begin(self, event: SessionStarted, run_id: str | None, sent: SentPosition, *, reports: bool) -> None:
        """Find out what the opened run holds, and send what it lacks."""
        held = self.last_step() if run_id is not None else None
        if held is not None and held < sent.step:
            self.__cursor.position = SentPosition(held, Part.ROLLOUTS) if held >= 0 else BEFORE_ALL
        self.__cursor.write()
        self.__in_doubt, self.__step_in_doubt = run_id is not None, held
        if self.__cursor.position == BEFORE_ALL and reports:
            self.log_path(0, "report", self.__directory.report.resolve())
        self.__send_earlier(event.start_step)

    def __send_earlier(self, start_step: int) -> None:
        """Send what steps before this session left in metrics.jsonl and the tracker lacks: a killed session was behind, or had no tracker."""
        for record in iterate_metrics(self.__directory.metrics):
            step, kind = record["step"], record["kind"]
            if step > start_step:
                return
            if kind == "step":
                self.__send_step(step, record["metrics"], record["seconds"], record["cpu_seconds"], record.get("peak_bytes", ()))
            elif kind == "evaluation":
                self.__send_evaluation(step, record["metrics"], record["seconds"])
            elif kind == "checkpoint":
                self.__send_checkpoint(step, self.__directory.checkpoints / record["path"])

    @hookimpl
    def skyrl_engine_rollouts_finished(self, event: RolloutsFinished) -> None:
        options = self.options
        if options.table_every and event.groups and (event.step - 1) % options.table_every == 0:
            position = SentPosition(event.step, Part.ROLLOUTS)
            self.__send(position, lambda: self.log_table(event.step, "attempts", self.__tabulate(event)))

    def __tabulate(self, event: RolloutsFinished) -> TrackedTable:
        return tabulate_attempts(event.groups, self.options.table_rows, self.__decode)

    @cached_property
    def __decode(self) -> Callable[[Sequence[int]], str]:
        decode, _ = decoder_of(self.__directory)
        return decode or (lambda ids: " ".join(map(str, ids)))

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.__send_step(event.step, event.metrics, event.seconds, event.cpu_seconds, event.peak_bytes)

    @hookimpl
    def skyrl_engine_evaluation_finished(self, event: EvaluationFinished) -> None:
        self.__send_evaluation(event.step, event.metrics, event.seconds)

    @hookimpl
    def skyrl_engine_checkpoint_saved(self, event: CheckpointSaved) -> None:
        self.__send_checkpoint(event.step, event.path)

    @hookimpl
    def skyrl_engine_session_finished(self, event: SessionFinished) -> None:
        if not self.__is_closed:
            self.close(None if event.error is None else hide_secrets(event.error))

    def __send_step(
        self, step: int, metrics: Mapping[str, Any], seconds: Any, cpu_seconds: Mapping[str, Any], peak_bytes: Sequence[int]
    ) -> None:
        spans = {f"cpu_seconds/{span}": value for span, value in cpu_seconds.items()}
        peak = {"peak_bytes": max(peak_bytes)} if peak_bytes else {}
        self.__send_metrics(SentPosition(step, Part.STEP), {**metrics, "seconds": seconds, **spans, **peak})

    def __send_evaluation(self, step: int, metrics: Mapping[str, Any], seconds: Any) -> None:
        named = {name if name.startswith(EVALUATION) else EVALUATION + name: value for name, value in metrics.items()}
        self.__send_metrics(SentPosition(step, Part.EVALUATION), {**named, f"{EVALUATION}seconds": seconds})

    def __send_checkpoint(self, step: int, path: Path) -> None:
        self.__send(SentPosition(step, Part.CHECKPOINT), lambda: self.log_path(step, "checkpoint", path.resolve()))

    def __send_metrics(self, position: SentPosition, metrics: Mapping[str, Any]) -> None:
        # metrics.jsonl has null for what is not finite
        numbers = {name: math.nan if value is None else float(value) for name, value in metrics.items()}
        if position > self.__cursor.position and (self.__in_doubt or position.step == self.__step_in_doubt):
            self.__in_doubt = False
            if self.holds(position.step, numbers):
                self.__cursor.advance(position)
        self.__send(position, lambda: self.log_metrics(position.step, numbers))

    def __send(self, position: SentPosition, send: Callable[[], None]) -> None:
        if position > self.__cursor.position:
            send()
            self.__cursor.advance(position)
