"""A run in Weights & Biases, online or in files that `wandb sync` uploads later."""

import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from attrs import field, frozen
from attrs.validators import in_, min_len, optional

from skyrl_engine import UnsupportedError
from skyrl_engine.tracking import TrackedRun, TrackedTable, Tracker, TrackerOptions

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline"]
STEP, EVALUATED_STEP = "step", "evaluation/step"
"""Numbers that are sent with those of a step and of an evaluation. The first is the axis of every chart: W&B's own step only counts calls."""

SERVICE = "WANDB_SERVICE"
"""Environment variable that names W&B's process, once there is one for this process."""

LOGIN_SECONDS = 30.0


@frozen(kw_only=True)
class WandbOptions(TrackerOptions):
    """Options of `wandb`."""

    project: str = field(default="skyrl-engine", validator=min_len(1))
    """Project of the run."""

    entity: str | None = field(default=None, validator=optional(min_len(1)))
    """User or team that the project belongs to; none: that of the login."""

    mode: Mode | None = field(default=None, validator=optional(in_(("online", "offline"))))
    """`online`: send at once; `offline`: write files for `wandb sync`; none: as WANDB_MODE says, else `online`."""


class WandbTracker(Tracker):
    """Sends a run through W&B's own process, which ends with this one; what it has not written by then is sent again."""

    name: ClassVar[str] = "wandb"

    def __init__(self, options: WandbOptions) -> None:
        super().__init__(options)
        self._wanted = options
        self._run: wandb.Run

    def open(self, run: TrackedRun) -> str:
        self._owns_service, self._hooks = SERVICE not in os.environ, (sys.excepthook, sys.exit)
        mode = self._wanted.mode or os.environ.get("WANDB_MODE", "online")
        self._offline = run.directory / "wandb" if mode == "offline" else None
        try:
            return self._begin(run, mode)
        except BaseException:
            self._end_service()
            raise

    def _begin(self, run: TrackedRun, mode: str) -> str:
        import wandb

        if mode not in ("offline", "disabled") and not wandb.login(prompt=False):
            raise UnsupportedError(
                "nobody is logged in to W&B here",
                remedy='Set WANDB_API_KEY, run `wandb login`, or set observers.wandb.mode = "offline"',
            )
        settings = wandb.Settings(
            console="off",
            silent=True,
            finish_timeout=self.finish_seconds,
            init_timeout=LOGIN_SECONDS,
            # what the package collects of the machine and of the command line may hold secrets
            disable_git=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
            save_code=False,
        )
        run_id = run.run_id or uuid.uuid4().hex[:12]
        (run.directory / "wandb").mkdir(exist_ok=True)
        self._run = wandb.init(
            project=self._wanted.project,
            entity=self._wanted.entity,
            name=run.name,
            id=run_id,
            dir=run.directory,
            config=run.config,
            mode=cast("Mode", mode),
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
        self._run.define_metric("*", step_metric=STEP)
        return run_id

    @property
    def _summary(self) -> Any:
        """Return the last number of every name; of a run that goes on, it is the server's."""
        return self._run.summary

    def _end_service(self) -> None:
        """End W&B's process, after which all is on disk; one that others of this process use too goes on."""
        if self._owns_service:
            import wandb

            wandb.teardown()
            os.environ.pop(SERVICE, None)
            # the package learns from its own ones how a program ended
            sys.excepthook, sys.exit = self._hooks

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        evaluated = {EVALUATED_STEP: step} if "evaluation/seconds" in metrics else {}
        self._run.log({**metrics, STEP: step, **evaluated})

    def log_table(self, step: int, name: str, table: TrackedTable) -> None:
        import wandb

        self._run.log({name: wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows]), STEP: step})

    def log_path(self, step: int, name: str, path: Path) -> None:  # noqa: ARG002 - the summary has no steps
        self._summary[name] = str(path)

    def close(self, error: str | None) -> None:
        if error is not None:
            self._run.summary["error"] = error
        self._run.finish(exit_code=0 if error is None else 1)
        self._end_service()

    def last_step(self) -> int:
        """Return the last step that is in the files, or that the server knows: what W&B's process had not written yet, died with this one."""
        if self._offline is not None:
            from skyrl_engine_wandb.offline_files import read_history

            return max((row[STEP] for row in read_history(self._offline) if STEP in row), default=-1)
        return int(self._summary.get(STEP, -1))

    def holds(self, step: int, metrics: Mapping[str, float]) -> bool:
        key = EVALUATED_STEP if "evaluation/seconds" in metrics else "seconds"
        if self._offline is not None:
            from skyrl_engine_wandb.offline_files import read_history

            return any(key in row and row.get(STEP) == step for row in read_history(self._offline))
        return bool(self._summary.get(STEP if key == "seconds" else EVALUATED_STEP) == step)
