"""A step of a run over a dataset, brought back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.engine.engine import Engine
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.run.progress import LOADING
from skyrl_engine.training.replay.step import Past, Progress, RecordedStep, check_nothing
from skyrl_engine.training.sft.student_samples import samples_answers
from skyrl_engine.training.sft.trainer import Start, StartedRun, start_sft


@contextmanager
def replay_on_data(
    start: Callable[..., Start],
    resolved: ResolvedConfig,
    past: Past,
    scratch: Path,
    *,
    progress: Progress | None = None,
    check: Callable[[Engine], None] = check_nothing,
) -> Iterator[RecordedStep]:
    """Bring a step back: rows are read again, and the steps since the checkpoint taken again. `start(resolved, progress=...)` is the trainer's.

    Raises CheckpointError where the data has changed, and UnsupportedError for steps on the student's own answers, which no run keeps.
    """
    if samples_answers(resolved):
        raise UnsupportedError(
            "steps on the student's own answers cannot be brought back: no run keeps the answers",
            remedy="Compare objectives in a run without sampling.share, or in one of trainer rl",
        )
    started = start(resolved, progress=progress)
    prepared, checkpoint = started.prepared, past.checkpoint
    state = None if checkpoint is None else prepared.state_in(checkpoint)
    position = prepared.start if state is None else state.position
    reference = None if state is None or state.reference is None else Path(state.reference).name
    references = past.link_references(scratch)
    if progress is not None:
        progress(LOADING, 0, 0)
    with Engine.launch(prepared.resolved, prepared.assembly, prepared.files, prepared.total_steps) as engine:
        if checkpoint is not None:
            engine.load(checkpoint.state)
        check(engine)
        trainer = started.trainer(StartedRun(engine, position, prepared.fingerprint, references, reference, scratch / "generator"))
        differences = past.take_steps(trainer.step, progress)
        yield RecordedStep(past.step, engine, trainer.plan_step(), {}, 1.0, None, past.metrics[past.step], past.start, differences)


replay_sft = partial(replay_on_data, start_sft)
"""Bring a step of trainer sft back."""
