"""The numbers of `metrics.jsonl` as columns over steps, and curves of a length that a page can hold."""

from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from skyrl_engine.run.metrics import iterate_metrics

POINTS = 500
"""Points of a curve at most; a longer one is drawn as means of equally many steps, with the lowest and the highest of them."""

MEMORY = "memory/rank "
"""Begins the name of a metric in bytes: the most memory that a rank took in a step."""

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


@frozen(eq=False)
class Series:
    """One metric: `steps` int64[n], rising, and `values` float64[n], all finite."""

    steps: Steps
    values: Floats


@frozen(eq=False)
class Curve:
    """A series of at most `POINTS` points: `values` are means, `lowest` and `highest` the extremes of the `width` steps of a point."""

    steps: Floats
    values: Floats
    lowest: Floats
    highest: Floats
    width: int


def shorten(series: Series, points: int = POINTS) -> Curve:
    """Return the series with at most so many points: each the mean of equally many values, at their mean step."""
    count = len(series.steps)
    width = max(1, -(-count // points))
    starts = np.arange(0, count, width)
    sizes = np.diff([*starts, count])
    steps, values = np.add.reduceat(series.steps, starts) / sizes, np.add.reduceat(series.values, starts) / sizes
    return Curve(steps, values, np.minimum.reduceat(series.values, starts), np.maximum.reduceat(series.values, starts), width)


@define
class _Column:
    steps: "array[int]" = field(factory=lambda: array("q"))
    values: "array[float]" = field(factory=lambda: array("d"))

    def to_series(self) -> Series:
        """Return a copy of the numbers: an array that shares its memory could not grow."""
        return Series(np.array(self.steps, np.int64), np.array(self.values, np.float64))


@frozen(eq=False)
class MetricsTable:
    """Numbers of a metrics file. Each series is of the steps that have the number; numbers that were not finite are left out."""

    steps: Mapping[str, Series]
    """Metrics of steps, `seconds` of each, and `memory/rank N`, the bytes that a rank took in it."""
    spans: Mapping[str, Series]
    """CPU seconds of steps by span."""
    evaluations: Mapping[str, Series]
    checkpoints: tuple[int, ...]
    last_step: int
    total_steps: int | None


@define
class TableBuilder:
    """Takes the records of a metrics file one by one, so that a long one takes no more memory than its numbers."""

    steps: dict[str, _Column] = field(factory=dict, init=False)
    spans: dict[str, _Column] = field(factory=dict, init=False)
    evaluations: dict[str, _Column] = field(factory=dict, init=False)
    checkpoints: list[int] = field(factory=list, init=False)
    last_step: int = field(default=0, init=False)
    total_steps: int | None = field(default=None, init=False)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record."""
        step = record["step"]
        if record["kind"] == "step":
            self.last_step, self.total_steps = step, record.get("total_steps", self.total_steps)
            _add(self.steps, step, {**_table(record, "metrics"), "seconds": record.get("seconds"), **_memory(record)})
            _add(self.spans, step, _table(record, "cpu_seconds"))
        elif record["kind"] == "evaluation":
            _add(self.evaluations, step, _table(record, "metrics"))
        elif record["kind"] == "checkpoint":
            self.checkpoints.append(step)
        elif record["kind"] == "session_started":
            self.total_steps = record.get("total_steps", self.total_steps)

    def build(self) -> MetricsTable:
        """Return the numbers that were taken so far."""
        steps, spans, evaluations = (
            {name: column.to_series() for name, column in columns.items()} for columns in (self.steps, self.spans, self.evaluations)
        )
        return MetricsTable(steps, spans, evaluations, tuple(self.checkpoints), self.last_step, self.total_steps)


def read_table(path: Path) -> MetricsTable:
    """Read a metrics file record by record."""
    builder = TableBuilder()
    for record in iterate_metrics(path):
        builder.add(record)
    return builder.build()


def _table(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def _memory(record: Mapping[str, Any]) -> dict[str, Any]:
    found = record.get("peak_bytes")
    return {f"{MEMORY}{rank}": count for rank, count in enumerate(found) if count} if isinstance(found, list) else {}


def _add(columns: dict[str, _Column], step: int, numbers: Mapping[str, Any]) -> None:
    for name, value in numbers.items():
        if isinstance(value, int | float):
            column = columns.get(name)
            if column is None:
                column = columns[name] = _Column()
            column.steps.append(step)
            column.values.append(value)


def list_names(tables: Iterable[Mapping[str, Series]]) -> list[str]:
    """Return the names of several tables, each once, in the order in which they come."""
    return list(dict.fromkeys(name for table in tables for name in table))
