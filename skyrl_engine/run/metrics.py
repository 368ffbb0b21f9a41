"""metrics.jsonl: one JSON object per line and event, written as it happens. The engine's own observer, found like anybody's."""

import json
import logging
import math
import mmap
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from attrs import define, field

from skyrl_engine import EngineError, hookimpl
from skyrl_engine.contracts.kinds.observer import CheckpointSaved, EvaluationFinished, SessionFinished, SessionStarted, StepFinished
from skyrl_engine.run.best import Extremes, collect_extremes, update_extremes
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.directory import RunDirectory

FILE_NAME = "metrics.jsonl"
MODEL_SPANS = frozenset({"model", "optimizer"})
"""Spans of a step's CPU time that are the model's own work; every other span is the engine's."""

_EVALUATION = b'{"kind": "evaluation"'
"""The beginning of a line that `MetricsJsonl` writes."""
_NEAR = 1 << 20
"""Bytes from either end of a file in which an evaluation before the first or after the last step is found."""
_BLOCK = 1 << 16
"""Bytes that are read at once where a file is read from its end."""

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
    _extremes: Extremes = field(factory=dict)

    @hookimpl
    def skyrl_engine_session_started(self, event: SessionStarted) -> None:
        self._path = event.directory / FILE_NAME
        try:
            keep_up_to(self._path, event.start_step)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise _write_error(self._path, error) from error
        self._extremes = collect_extremes(read_evaluations(self._path))
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
        metrics = _numbers(event.metrics)
        update_extremes(self._extremes, event.step, metrics)
        self._write("evaluation", step=event.step, seconds=_number(event.seconds), metrics=metrics, extremes=self._extremes)

    @hookimpl
    def skyrl_engine_checkpoint_saved(self, event: CheckpointSaved) -> None:
        seconds = {"seconds": _number(event.seconds), "blocked_seconds": _number(event.blocked_seconds)}
        self._write("checkpoint", step=event.step, path=event.path.name, **seconds)

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
            record = parse_line(line)
            if record is None:
                logger.warning("%s: line %d is damaged and skipped", path, number)
            else:
                yield record


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the record of a whole line, None for a damaged one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # a crash of the machine, not only of the process, can leave a line of zero bytes
        return None
    whole = isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int)
    return record if whole and isinstance(record.get("total_steps"), int | None) else None


def read_last_step(path: Path) -> tuple[dict[str, Any] | None, int | None]:
    """Return the last record of a step, None before the first, and the number of steps in all, None where nothing says it.

    It reads the end of the file alone, however long that is. Raises OSError.
    """
    total: int | None = None
    for record in _iterate_backwards(path):
        if record["kind"] in ("step", "session_started") and total is None:
            stated = record.get("total_steps")
            total = stated if isinstance(stated, int) else None
        if record["kind"] == "step":
            return record, total
    return None, total


def _iterate_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole records of a metrics file, the last one first."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        end, rest = file.seek(0, 2), b""
        first = True
        while end > 0:
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            lines = (file.read(end - begin) + rest).split(b"\n")
            rest, end = lines[0], begin
            if begin == 0:
                lines.insert(0, b"")
            for place in range(len(lines) - 1, 0, -1):
                # what stands after the last line break is a line that is being written, or that a crash left
                if not (first and place == len(lines) - 1) and lines[place] and (record := parse_line(lines[place])) is not None:
                    yield record
            first = False


def read_evaluations(path: Path) -> dict[int, dict[str, float]]:
    """Return the finite numbers of every evaluation of a metrics file by step. The lines of steps are passed over unread. Raises OSError."""
    evaluations: dict[int, dict[str, float]] = {}
    if not path.is_file() or path.stat().st_size == 0:
        return evaluations
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = 0
        while (at := _find_line(content, at)) >= 0 and (end := content.find(b"\n", at)) >= 0:
            record = parse_line(content[at:end])
            if record is not None and isinstance(record.get("metrics"), dict):
                evaluations[record["step"]] = {
                    name: value for name, value in record["metrics"].items() if isinstance(value, int | float)
                }
            at = end
    return evaluations


def read_last_evaluation(path: Path, *, at_ends: bool) -> dict[str, Any] | None:
    """Return the last record of an evaluation, None without one. Raises OSError.

    It reads backwards up to that record; `at_ends`: no further than the end and the beginning, for runs that evaluate nowhere else.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # what stands after the last line break is a line that is being written, or that a crash left
        end = content.rfind(b"\n") + 1
        at = content.rfind(b"\n" + _EVALUATION, max(0, end - _NEAR) if at_ends else 0, end)
        if at < 0:
            at = content.rfind(b"\n" + _EVALUATION, 0, min(end, _NEAR))
        # without any it is the first line or none
        line = content[at + 1 : content.find(b"\n", at + 1) + 1]
    return parse_line(line) if line.startswith(_EVALUATION) else None


def _find_line(content: mmap.mmap, at: int) -> int:
    """Return where the first line of an evaluation begins, from the line break or the beginning of the file at `at` on; -1 without one."""
    if at == 0 and content[: len(_EVALUATION)] == _EVALUATION:
        return 0
    found = content.find(b"\n" + _EVALUATION, at)
    return found if found < 0 else found + 1


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
