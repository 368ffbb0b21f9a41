"""The progress of a run, as plain values for whoever shows it: loss, tokens per second, time left."""

from collections import deque
from collections.abc import Callable

from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.observer import EvaluationFinished, SessionFinished, SessionStarted, StepFinished
from skyrl_engine.hooks.markers import hookimpl

_WINDOW = 20

LOADING = "loading the model"
"""Label of progress of 0 of 0, while ranks start and read the weights: nothing can be counted."""


@frozen
class Progress:
    """Numbers are those of the last step or evaluation, None while unknown; `tokens_per_second` counts real tokens of all ranks.

    `reward` and `evaluation_reward` are those of RL. Of sampling beside training, `staleness` is the mean age of a step's groups in steps, and
    `waited` the share of the step in which training waited for them.
    """

    step: int
    total_steps: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    evaluation_loss: float | None = None
    reward: float | None = None
    evaluation_reward: float | None = None
    tokens_per_second: float | None = None
    staleness: float | None = None
    waited: float | None = None
    seconds_left: float | None = None
    finished: bool = False

    def __str__(self) -> str:
        """One line, for logs and terminals without graphics."""
        parts = [f"step {self.step}/{self.total_steps}"]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.4f}")
        elif self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.evaluation_loss is not None:
            parts.append(f"evaluation loss {self.evaluation_loss:.4f}")
        if self.evaluation_reward is not None:
            parts.append(f"evaluation reward {self.evaluation_reward:.4f}")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.staleness is not None and self.waited is not None:
            parts.append(f"staleness {self.staleness:.1f}, waited {self.waited:.0%}")
        if self.seconds_left is not None and not self.finished:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        return ", ".join(parts)


class ProgressObserver:
    """An observer that calls `listener` with the current Progress after every event."""

    def __init__(self, listener: Callable[[Progress], None]) -> None:
        self._listener = listener
        self._progress = Progress(0, 0)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    @hookimpl
    def skyrl_engine_session_started(self, event: SessionStarted) -> None:
        self._recent.clear()
        self._report(Progress(event.start_step, event.total_steps))

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self._recent.append((event.seconds, event.metrics.get("tokens", 0.0)))
        seconds = sum(seconds for seconds, _ in self._recent)
        tokens = sum(tokens for _, tokens in self._recent)
        self._report(
            evolve(
                self._progress,
                step=event.step,
                loss=event.metrics.get("loss"),
                reward=event.metrics.get("reward/mean"),
                grad_norm=event.metrics.get("grad_norm"),
                learning_rate=event.metrics.get("learning_rate"),
                tokens_per_second=tokens / seconds if seconds > 0 else None,
                staleness=event.metrics.get("async/staleness_mean"),
                waited=_share(event.metrics.get("async/waited_seconds"), event.seconds),
                seconds_left=seconds / len(self._recent) * (event.total_steps - event.step),
            )
        )

    @hookimpl
    def skyrl_engine_evaluation_finished(self, event: EvaluationFinished) -> None:
        rewards = (value for name, value in event.metrics.items() if name.startswith("evaluation/avg@"))
        self._report(evolve(self._progress, evaluation_loss=event.metrics.get("loss"), evaluation_reward=next(rewards, None)))

    @hookimpl
    def skyrl_engine_session_finished(self, event: SessionFinished) -> None:
        self._report(evolve(self._progress, step=event.step, finished=True))

    def _report(self, progress: Progress) -> None:
        self._progress = progress
        self._listener(progress)


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else min(1.0, part / whole)
