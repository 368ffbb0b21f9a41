"""A step of a run that was recorded, brought back: the weights that it began with, and its batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.errors import CheckpointError, EngineError, UnsupportedError
from skyrl_engine.run.checkpoint import Checkpoint, CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.loop import StepDone

COMPARED = ("loss", "grad_norm")
"""Metrics of a step by which a replay is held against what the run recorded."""

Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it, and how much there is."""


@frozen
class ReplayDifference:
    """A metric of a step that the replay does not give the bits of: its largest relative difference, and the step where it first differs."""

    metric: str
    step: int
    relative: float


@frozen(eq=False)
class RecordedStep:
    """A step as it was about to be taken. `engine` holds its weights, `plan` its whole batch as one mini-batch, with every column that the
    run's own objective reads.

    `bound` and `temperature` are those of the step's pass. `with_advantage` makes the plan with another estimator's advantages; None where the
    trainer has none. `recorded` holds the step's metrics as the run recorded them. `from_step` is the step of the checkpoint that was gone on
    from, 0 for the start; `differences` say where the steps that were taken again after it are not as they were recorded.
    """

    step: int
    engine: Engine
    plan: Plan
    bound: Mapping[str, str]
    temperature: float
    with_advantage: Callable[[SelectedPlugin], Plan] | None
    recorded: Mapping[str, float]
    from_step: int
    differences: tuple[ReplayDifference, ...]


class Replay(Protocol):
    """A trainer's way back to one of its steps: `skyrl_engine.config.trainers.Trainer.replay` names one."""

    def __call__(
        self,
        resolved: ResolvedConfig,
        past: "Past",
        scratch: Path,
        *,
        progress: Progress | None,
        check: Callable[[Engine], None],
    ) -> AbstractContextManager[RecordedStep]:
        """Start the ranks and bring `past.step` back; what is written goes to `scratch`, an empty folder, and nothing to the run directory.

        `check` is called with the engine before any step is taken again, and leaves it as it is.
        """


@frozen(eq=False)
class Past:
    """A run directory as far as a replay reads it: step number `step` is wanted, `checkpoint` is the newest before it, None for the start."""

    directory: RunDirectory
    step: int
    checkpoint: Checkpoint | None
    metrics: Mapping[int, Mapping[str, Any]]
    """Recorded metrics of steps, by step."""
    seconds: Mapping[int, float]
    """Wall seconds that steps took in the run, by step."""

    @classmethod
    def of(cls, path: Path, step: int) -> "Past":
        """Find where to go on from. Raises EngineError for what is no run, and for a step that the run has not taken; CheckpointError for a
        damaged checkpoint.
        """
        directory = RunDirectory(path)
        if not directory.config.is_file():
            raise EngineError(f"there is no run directory {path}", remedy="Name the directory that a run has written")
        steps = [record for record in read_metrics(directory.metrics) if record["kind"] == "step"]
        metrics = {record["step"]: record["metrics"] for record in steps}
        if step not in metrics:
            last = max(metrics, default=0)
            raise EngineError(
                f"{path} has not recorded step {step:,}",
                remedy=f"Choose one of its steps, 1 to {last:,}" if last else "Train it first",
            )
        earlier = [saved for saved in CheckpointStore(directory.checkpoints).all() if saved.step < step]
        if earlier:
            earlier[-1].verify()
        seconds = {record["step"]: float(record["seconds"]) for record in steps}
        return cls(directory, step, earlier[-1] if earlier else None, metrics, seconds)

    @property
    def start(self) -> int:
        """Return the step that is gone on from."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def link_references(self, scratch: Path) -> Path:
        """Return a folder in `scratch` with the models that became the run's reference, to which further ones can be written."""
        folder = scratch / "reference"
        folder.mkdir()
        known = self.directory.reference
        for entry in sorted(known.iterdir()) if known.is_dir() else ():
            (folder / entry.name).symlink_to(entry.absolute(), target_is_directory=entry.is_dir())
        return folder

    def take_steps(self, take: Callable[[int], StepDone], progress: Progress | None) -> tuple[ReplayDifference, ...]:
        """Take the steps up to the wanted one again, and say where they differ from the record."""
        differences: dict[str, ReplayDifference] = {}
        if progress is not None and self.step - self.start > 1:
            again = range(self.start + 1, self.step)
            took = sum(self.seconds.get(number, 0.0) for number in again)
            # said also where no counter is shown
            progress(f"taking {len(again):,} steps again, which took the run {took:,.0f} s", 0, 0)
        for number in range(self.start + 1, self.step):
            if progress is not None:
                progress("steps taken again", number - self.start - 1, self.step - 1 - self.start)
            done = take(number)
            for difference in compare_metrics(number, done.metrics, self.metrics.get(number, {})):
                known = differences.get(difference.metric)
                worst = difference.relative if known is None else max(known.relative, difference.relative)
                first = difference.step if known is None else known.step
                differences[difference.metric] = ReplayDifference(difference.metric, first, worst)
        return tuple(differences.values())


def compare_metrics(step: int, now: Mapping[str, float], recorded: Mapping[str, Any]) -> Sequence[ReplayDifference]:
    """Return the metrics of a step that are not those that were recorded, bit for bit."""
    found = []
    for name in COMPARED:
        then = recorded.get(name)
        if isinstance(then, int | float) and name in now and float(then) != now[name]:
            relative = abs(now[name] - then) / max(abs(then), math.ulp(1.0))
            found.append(ReplayDifference(name, step, relative))
    return found


def refuse_before_start(past: Past, what: str, keys: str) -> None:
    """Raise CheckpointError where what a replay needs of the steps since its checkpoint is gone, naming the keys that keep it."""
    raise CheckpointError(
        f"{past.directory.path} no longer holds {what}, which step {past.step:,} is brought back with from step {past.start:,}",
        remedy=f"Choose a later step, or keep more in the next run: {keys}",
    )


def check_nothing(engine: Engine) -> None:
    """Accept an engine as it is."""


def refuse_trainer(name: str) -> UnsupportedError:
    """Return the refusal of a trainer that does not say how its steps are brought back."""
    return UnsupportedError(
        f"trainer {name} of another distribution does not bring its steps back",
        remedy="Compare objectives in runs of sft, preference, reward_model and rl",
    )
