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
from skyrl_engine.training.sft.state import fingerprint, state_in
from skyrl_engine.training.sft.student_samples import samples_answers
from skyrl_engine.training.sft.trainer import Start, StartedRun, start_sft


@contextmanager
def replay_on_data(
    start: Callable[[ResolvedConfig], Start],
    resolved: ResolvedConfig,
    past: Past,
    scratch: Path,
    *,
    progress: Progress | None,
    check: Callable[[Engine], None],
) -> Iterator[RecordedStep]:
    """Bring a step back: rows are read again, and the steps since the checkpoint taken again.

    Raises CheckpointError where the data has changed, and UnsupportedError for steps on the student's own answers, which no run keeps.
    """
    if samples_answers(resolved):
        raise UnsupportedError(
            "steps on the student's own answers cannot be brought back: no run keeps the answers",
            remedy="Compare objectives in a run without sampling.share, or in one of trainer rl",
        )
    started = start(resolved)
    prepared, checkpoint = started.prepared, past.checkpoint
    data = fingerprint(prepared.train.columns)
    state = (
        None
        if checkpoint is None
        else state_in(checkpoint, prepared.order, data, split_by_seed=resolved.config.data.eval_fraction > 0)
    )
    position = prepared.order.start() if state is None else state.position
    reference = None if state is None or state.reference is None else Path(state.reference).name
    references = past.link_references(scratch)
    if progress is not None:
        progress(LOADING, 0, 0)
    with Engine.launch(prepared.resolved, prepared.assembly, prepared.files, prepared.total_steps) as engine:
        if checkpoint is not None:
            engine.load(checkpoint.state)
        check(engine)
        trainer = started.trainer(StartedRun(engine, position, data, references, reference, scratch / "generator"))
        differences = past.take_steps(trainer.step, progress)
        yield RecordedStep(past.step, engine, trainer.plan_step(), {}, 1.0, None, past.metrics[past.step], past.start, differences)


@contextmanager
def replay_sft(
    resolved: ResolvedConfig,
    past: Past,
    scratch: Path,
    *,
    progress: Progress | None = None,
    check: Callable[[Engine], None] = check_nothing,
) -> Iterator[RecordedStep]:
    """Bring a step of trainer sft back, as `replay_on_data` says."""
    with replay_on_data(partial(start_sft, progress=progress), resolved, past, scratch, progress=progress, check=check) as step:
        yield step
