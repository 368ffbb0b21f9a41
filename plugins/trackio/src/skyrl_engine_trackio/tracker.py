"""A run in Trackio: its database on this machine, a Space of Hugging Face, or a server of one's own."""

import math
import sys
import uuid
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from attrs import field, frozen
from attrs.validators import min_len, optional

from skyrl_engine import UnsupportedError
from skyrl_engine.tracking import TrackedRun, TrackedTable, Tracker, TrackerOptions


@frozen(kw_only=True)
class TrackioOptions(TrackerOptions):
    """Options of `trackio`."""

    project: str = field(default="skyrl-engine", validator=min_len(1))
    """Project of the run."""

    space: str | None = field(default=None, validator=optional(min_len(1)))
    """Space of Hugging Face, OWNER/NAME, for the project; none: TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, else a database on this machine."""


class TrackioTracker(Tracker):
    """Gives a run to Trackio, whose thread writes it twice a second; what a kill makes it lose is sent again, where its database is here."""

    name: ClassVar[str] = "trackio"

    def __init__(self, options: TrackioOptions) -> None:
        super().__init__(options)
        self._wanted = options

    def open(self, run: TrackedRun) -> str:
        if find_spec("trackio") is None:
            raise UnsupportedError("the package trackio is not installed", remedy="Install skyrl-engine-trackio[client]")
        import trackio

        self._storage: Any = trackio.SQLiteStorage
        self._name = run.run_id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        # standard output is a command's result
        with redirect_stdout(sys.stderr):
            self._run: Any = trackio.init(
                self._wanted.project,
                name=self._name,
                space_id=self._wanted.space,
                config=dict(run.config),
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        self._is_here = not self._wanted.space and not trackio.utils.resolve_space_id_and_server_url(None, None)[0]
        return self._name

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        # its charts know no numbers that are not finite
        self._run.log({name: value if math.isfinite(value) else None for name, value in metrics.items()}, step=step)

    def log_table(self, step: int, name: str, table: TrackedTable) -> None:
        import trackio

        rows = [list(row) for row in table.rows]
        self._run.log({name: trackio.Table(columns=list(table.columns), data=rows)}, step=step)

    def log_path(self, step: int, name: str, path: Path) -> None:
        import trackio

        self._run.log({name: trackio.Markdown(f"`{path}`")}, step=step)

    def close(self, error: str | None) -> None:
        if error is not None:
            import trackio

            self._run.log({"error": trackio.Markdown(error)})
        with redirect_stdout(sys.stderr):
            self._run.finish()

    def last_step(self) -> int | None:
        if not self._is_here:
            return None
        step = self._storage.get_max_step_for_run(self._wanted.project, self._name)
        return -1 if step is None else int(step)

    def holds(self, step: int, metrics: Mapping[str, float]) -> bool:
        name = next(name for name in ("evaluation/seconds", "seconds") if name in metrics)
        rows = self._storage.get_logs(self._wanted.project, self._name) if self._is_here else ()
        return any(row.get("step") == step and row.get(name) is not None for row in rows)
