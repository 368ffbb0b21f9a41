"""A run as TensorBoard's event files: scalars, texts and the configuration as hyperparameters."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen
from attrs.validators import min_len, optional

from skyrl_engine.contracts import PLACE
from skyrl_engine.tracking import TrackedRun, TrackedTable, Tracker, TrackerOptions

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

SECONDS = ("seconds", "evaluation/seconds")
"""Tags that every step, and every evaluation, has."""


@frozen(kw_only=True)
class TensorboardOptions(TrackerOptions):
    """Options of `tensorboard`."""

    directory: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "output"})
    """Folder of the event files, one for each run; none: `tensorboard` in the run directory."""


class EventFiles(Tracker):
    """Writes one event file per session. All numbers of a step are one record, which is on disk when `log_metrics` returns."""

    name: ClassVar[str] = "tensorboard"

    def __init__(self, options: TensorboardOptions) -> None:
        super().__init__(options)
        self._directory = options.directory

    def open(self, run: TrackedRun) -> str:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(self._directory).expanduser() / run.name if self._directory else run.directory / "tensorboard"
        self._earlier = sorted(folder.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime)
        self._writer = EventFileWriter(str(folder))
        if run.run_id is None and run.config:
            self._write(0, hparams_pb(run.config, trial_id=run.name))
        return str(folder)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(step, Summary(value=[Summary.Value(tag=name, simple_value=number) for name, number in metrics.items()]))

    def log_table(self, step: int, name: str, table: TrackedTable) -> None:
        self._write_text(step, name, table.to_markdown())

    def log_path(self, step: int, name: str, path: Path) -> None:
        self._write_text(step, name, f"`{path}`")

    def close(self, error: str | None) -> None:
        if error is not None:
            self._write_text(0, "error", error)
        self._writer.close()

    def holds(self, step: int, metrics: Mapping[str, float]) -> bool:
        tag = next(name for name in SECONDS if name in metrics)
        return any(
            event.step == step and any(value.tag == tag for value in event.summary.value)
            for file in self._earlier[-1:]
            for event in _read(file)
        )

    def _write_text(self, step: int, name: str, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(display_name=name, description="")
        value = Summary.Value(tag=name, metadata=metadata, tensor=make_tensor_proto([text.encode()]))
        self._write(step, Summary(value=[value]))

    def _write(self, step: int, summary: "Summary") -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()


def _read(file: Path) -> "Iterator[Event]":
    """Yield the events of a file, up to a record that a kill cut off."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    yield from EventFileLoader(str(file)).Load()
