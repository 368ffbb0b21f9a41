"""A step of a run of trainer reward_model, brought back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.engine.engine import Engine
from skyrl_engine.training.replay.step import Past, Progress, RecordedStep, check_nothing
from skyrl_engine.training.reward_model.trainer import start_reward_model
from skyrl_engine.training.sft.replay import replay_on_data


@contextmanager
def replay_reward_model(
    resolved: ResolvedConfig,
    past: Past,
    scratch: Path,
    *,
    progress: Progress | None = None,
    check: Callable[[Engine], None] = check_nothing,
) -> Iterator[RecordedStep]:
    """Bring a step of trainer reward_model back, as `replay_on_data` says."""
    with replay_on_data(
        partial(start_reward_model, progress=progress), resolved, past, scratch, progress=progress, check=check
    ) as step:
        yield step
