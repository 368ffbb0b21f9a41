"""metrics.jsonl: one JSON object per line and event, written as it happens. The engine's own observer, found like anybody's."""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from attrs import define

from skyrl_engine import EngineError, hookimpl
from skyrl_engine.contracts.kinds.observer import CheckpointSaved, EvaluationFinished, SessionFinished, SessionStarted, StepFinished
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.directory import RunDirectory

FILE_NAME = "metrics.jsonl"
MODEL_SPANS = frozenset({"model", "optimizer"})
"""Spans of a step's CPU time that are the model's own work; every other span is the engine's."""

logger = logging.getLogger(__name__)


@define(eq=False)
class MetricsJsonl:
    """Writes `metrics.jsonl` into the run directory.

    Records have a `kind`: session_started, step, evaluation, checkpoint, session_finished. Numbers keep every bit (shortest decimal that
    reads back equal); what is not finite becomes null. Each record is one line, handed to the operating system at once. A session that
    resumes after step s first drops records of later steps and a torn last line, so that no step appears twice.
    """

    _path: Path = Path(FILE_NAME)
    _file: FileIO | None = None

    @hookimpl
    def skyrl_engine_session_started(self, event: SessionStarted) -> None:
        self._path = event.directory / FILE_NAME
        try:
            keep_up_to(self._path, event.start_step)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise _write_error(self._path, error) from error
        self._record_published(event)
        self._write("session_started", step=event.start_step, total_steps=event.total_steps)

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self._write(
            "step",
            step=event.step,
            total_steps=event.total_steps,
            seconds=_number(event.seconds),
            metrics=_numbers(event.metrics),
            cpu_seconds=_numbers(event.cpu_seconds),
            peak_bytes=list(event.peak_bytes),
        )

    @hookimpl
    def skyrl_engine_evaluation_finished(self, event: EvaluationFinished) -> None:
        self._write("evaluation", step=event.step, seconds=_number(event.seconds), metrics=_numbers(event.metrics))

    @hookimpl
    def skyrl_engine_checkpoint_saved(self, event: CheckpointSaved) -> None:
        self._write("checkpoint", step=event.step, path=event.path.name)

    @hookimpl
    def skyrl_engine_session_finished(self, event: SessionFinished) -> None:
        if self._file is not None:
            try:
                self._write("session_finished", step=event.step, error=event.error)
            finally:
                self._file.close()
                self._file = None

    def _record_published(self, event: SessionStarted) -> None:
        """Record the checkpoint that this session starts from, if the process that published it ended before it could."""
        known = {record["step"] for record in read_metrics(self._path) if record["kind"] == "checkpoint"}
        for checkpoint in CheckpointStore(RunDirectory(event.directory).checkpoints).all():
            if checkpoint.step == event.start_step and checkpoint.step not in known:
                self._write("checkpoint", step=checkpoint.step, path=checkpoint.path.name)

    def _write(self, kind: str, **values: Any) -> None:
        assert self._file is not None, "an event before session_started"
        line = (json.dumps({"kind": kind, **values}, allow_nan=False) + "\n").encode()
        try:
            while line:  # an unbuffered write may take only a part, as it does before a disk is full
                line = line[self._file.write(line) :]
        except OSError as error:
            raise _write_error(self._path, error) from error


class MetricsJsonlPlugin:
    """The plugin object behind the entry point."""

    @hookimpl
    def skyrl_engine_make_observer(self) -> MetricsJsonl:
        return MetricsJsonl()


metrics_jsonl = MetricsJsonlPlugin()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, in order. A last line without its end, left by a crash, is no record."""
    return list(iterate_metrics(path))


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file one by one, as `read_metrics` returns them."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:  # a crash of the machine, not only of the process, can leave a line of zero bytes
                record = None
            if isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int):
                yield record
            else:
                logger.warning("%s: line %d is damaged and skipped", path, number)


def keep_up_to(path: Path, step: int) -> None:
    """Drop what a session that resumes after `step` will write again: records of later steps, and a torn or damaged line.

    From step 0 the run starts over, evaluation before the first step included, and nothing is kept.
    """
    if not path.exists():
        return
    records = [record for record in read_metrics(path) if step > 0 and record["step"] <= step]
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    aside.replace(path)


def engine_share(cpu_seconds: Mapping[str, float]) -> float:
    """Part of the CPU time that the engine itself took, 0 to 1; NaN where no time was measured."""
    total = sum(cpu_seconds.values())
    engine = sum(seconds for span, seconds in cpu_seconds.items() if span not in MODEL_SPANS)
    return engine / total if total > 0 else float("nan")


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


def _write_error(path: Path, error: OSError) -> EngineError:
    return EngineError(f"{path} cannot be written ({error})", remedy="Free space there or make it writable, then resume the run")
