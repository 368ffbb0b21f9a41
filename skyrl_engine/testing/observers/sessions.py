"""Sessions of runs as observers are told them, in files of a folder: whole ones, failed ones, and ones that are killed and resumed."""

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from attrs import evolve, frozen
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.observer import (
    CheckpointSaved,
    EvaluationFinished,
    RolloutsFinished,
    SessionFinished,
    SessionStarted,
    StepFinished,
)
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import EngineError
from skyrl_engine.run.observer_calls import ObserverBus
from skyrl_engine.testing.promise import Undecidable
from skyrl_engine.testing.rollout_cases import plain_group

Event = SessionStarted | RolloutsFinished | StepFinished | EvaluationFinished | CheckpointSaved | SessionFinished

NAMES = ("loss", "grad_norm", "learning_rate", "tokens", "reward/mean", "policy/gap_max", "evaluation/avg@1")
"""Names of metrics; a run has those of its trainer and loss."""

EVERY = 2
"""An evaluation and a checkpoint follow every second step."""

PATIENCE_SECONDS = 20.0
"""An observer that has not taken an event after so long is taken to wait for ever."""


@frozen
class ToldSession:
    """A session of a run of `total` steps: it begins after step `start` and ends after step `end`, or is killed there.

    `numbers` are the metrics of every step, which the step's number is added to. `rollouts`: it is of the trainer rl.
    """

    total: int
    start: int
    end: int
    numbers: tuple[tuple[str, float], ...]
    rollouts: bool = False
    error: str | None = None
    killed: bool = False

    def events(self, directory: Path) -> Iterator[Event]:
        """Yield the events, made anew in every call."""
        manifest = {"format": 1, "config": {"trainer": "rl" if self.rollouts else "sft"}, "sessions": [{"start_step": self.start}]}
        yield SessionStarted(directory, manifest, self.total, self.start)
        for step in range(self.start + 1, self.end + 1):
            if self.rollouts:
                yield RolloutsFinished(step, *self._groups(step))
            yield StepFinished(step, self.total, {name: number + step for name, number in self.numbers}, 0.25, {"model": 0.125})
            if step % EVERY == 0:
                yield EvaluationFinished(step, {"loss": 1.0 / step}, 0.5)
                path = directory / "checkpoints" / f"step-{step:08d}"
                path.mkdir(parents=True, exist_ok=True)
                yield CheckpointSaved(step, path)
        if not self.killed:
            yield SessionFinished(self.end, self.error)

    @staticmethod
    def _groups(step: int) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        groups = tuple(plain_group(2 * step + place, rewards=(1.0, 0.0, 0.5)) for place in range(2))
        dropped = (plain_group(100 + step, rewards=(0.0, 0.0), dropped="zero_variance"),) if step % 2 else ()
        return groups, dropped

    def __str__(self) -> str:
        end = "is killed" if self.killed else "ends" if self.error is None else f"fails ({self.error})"
        numbers = ", ".join(f"{name} {number:g}" for name, number in self.numbers)
        return (
            f"{'rl' if self.rollouts else 'sft'}, from step {self.start} to {self.end} of {self.total}, where it {end}; {numbers}"
        )


def draw_sessions() -> "st.SearchStrategy[ToldSession]":
    """Draw sessions of a few steps, from the start or resumed, of any metrics, some of which are not finite."""
    number = st.floats(-1e6, 1e6) | st.sampled_from((math.nan, math.inf, 0.0, 1e-9))
    numbers = st.lists(st.tuples(st.sampled_from(NAMES), number), max_size=5, unique_by=lambda pair: pair[0]).map(tuple)

    @st.composite
    def draw(draw: st.DrawFn) -> ToldSession:
        start = draw(st.sampled_from((0, 0, 3)))
        end = start + draw(st.integers(0, 5))
        error = draw(st.sampled_from((None, None, "rank 1 ended with exit code 9")))
        kept = (("loss", 0.5), *(pair for pair in draw(numbers) if pair[0] != "loss"))
        killed = draw(st.sampled_from((False, False, True)))
        return ToldSession(max(1, end) if error is None else end + 2, start, end, kept, draw(st.booleans()), error, killed)

    return draw()


def list_sessions() -> list[ToldSession]:
    """Return a whole session of each trainer, one that fails before its first step, and one that resumes and has no step left."""
    whole = ToldSession(6, 0, 6, tuple((name, place / 8) for place, name in enumerate(NAMES)))
    return [whole, evolve(whole, rollouts=True), ToldSession(6, 0, 0, (("loss", 0.5),), error="no memory"), evolve(whole, start=6)]


def tell(observers: Sequence[object], sessions: Sequence[ToldSession], directory: Path) -> None:
    """Tell observers sessions in turn. Raises EngineError as a run does."""
    for session in sessions:
        bus = ObserverBus(observers, on_error="stop")
        bus.manifest_extra()
        for event in session.events(directory):
            method_of(bus, event)(event)


def method_of(bus: ObserverBus, event: Event) -> Any:
    """Return the method of a bus that tells an event of this sort."""
    return {
        SessionStarted: bus.session_started,
        RolloutsFinished: bus.rollouts_finished,
        StepFinished: bus.step_finished,
        EvaluationFinished: bus.evaluation_finished,
        CheckpointSaved: bus.checkpoint_saved,
        SessionFinished: bus.session_finished,
    }[type(event)]


def collect_files(make_observers: Callable[[], Sequence[object]], sessions: Sequence[ToldSession]) -> dict[str, bytes]:
    """Tell each session to observers of its own, in one run directory, and return what files they leave there, by their path.

    Raises Undecidable where an observer fails, which another promise covers.
    """
    with TemporaryDirectory(prefix="skyrl-engine-observer-") as name, warnings.catch_warnings():
        # a session that is killed closes nothing
        warnings.simplefilter("ignore", ResourceWarning)
        directory = Path(name) / "run"
        directory.mkdir()
        try:
            for session in sessions:
                tell(make_observers(), [session], directory)
        except EngineError as error:
            raise Undecidable(error.cause) from error
        if any(session.killed for session in sessions):
            gc.collect()
        files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
        return {path: file.read_bytes().replace(str(directory).encode(), b"RUN") for path, file in files.items()}


def measure_seconds(call: Any) -> float | None:
    """Call in a thread and return how long it took, in seconds; None where it does not return."""
    took: list[float] = []

    def run() -> None:
        started = time.monotonic()
        try:
            call()
        finally:
            took.append(time.monotonic() - started)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    return took[0] if took else None
