"""A run's progress as lines of text: for logs, pipes, and above the bar on a terminal."""

import time
from collections.abc import Callable

from skyrl_engine.run.progress import Progress

_SECONDS_BETWEEN_LINES = 30.0
_LINES_PER_RUN = 20
HEADER = f"{'step':>12}  {'loss':>8}  {'tokens/s':>9}  {'learning rate':>13}  {'gradient norm':>13}  {'left':>8}"

BESIDE_HEADER = f"  {'staleness':>9}  {'waited':>6}"
"""Further columns of a run that samples beside training."""


class ProgressLines:
    """Writes a table line by line: about twenty steps of a run, at least one every half a minute, and every evaluation."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._last = Progress(0, 0)
        self._written_at = clock()
        self._header_written = False
        self._of_reward = False
        self._beside = False

    def __call__(self, progress: Progress) -> None:
        self._of_reward = progress.reward is not None or progress.evaluation_reward is not None
        self._beside = progress.staleness is not None
        if progress.evaluation_loss is not None and progress.evaluation_loss != self._last.evaluation_loss:
            self._line(f"held-out loss {progress.evaluation_loss:.4f} after step {progress.step}")
        elif progress.evaluation_reward is not None and progress.evaluation_reward != self._last.evaluation_reward:
            self._line(f"held-out reward {progress.evaluation_reward:.4f} after step {progress.step}")
        elif progress.step > self._last.step and progress.loss is not None and self._is_due(progress):
            self._line(progress_row(progress))
        self._last = progress

    def _is_due(self, progress: Progress) -> bool:
        interval = max(1, progress.total_steps // _LINES_PER_RUN)
        at_milestone = progress.step == 1 or progress.step % interval == 0 or progress.step == progress.total_steps
        return at_milestone or self._clock() - self._written_at >= _SECONDS_BETWEEN_LINES

    def _line(self, line: str) -> None:
        if not self._header_written:
            header = HEADER.replace("    loss", "  reward") if self._of_reward else HEADER
            self._write(header + BESIDE_HEADER if self._beside else header)
            self._header_written = True
        self._write(line if line.startswith(" ") else f"{'':>12}  {line}")
        self._written_at = self._clock()


def progress_row(progress: Progress) -> str:
    """Return the line of one step under the header, with a dash for an unknown number."""
    position = f"{progress.step}/{progress.total_steps}"
    beside = () if progress.staleness is None else (_number(progress.staleness, 9, ".2f"), _number(progress.waited, 6, ".0%"))
    return "  ".join(
        (
            f"{position:>12}",
            _number(progress.loss if progress.reward is None else progress.reward, 8, ".4f"),
            _number(progress.tokens_per_second, 9, ",.0f"),
            _number(progress.learning_rate, 13, ".2e"),
            _number(progress.grad_norm, 13, ".4f"),
            f"{duration(progress.seconds_left):>8}",
            *beside,
        )
    )


def duration(seconds: float | None) -> str:
    """Return seconds as 0:05, 12:34 or 1:02:03."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
