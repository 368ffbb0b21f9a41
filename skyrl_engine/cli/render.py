"""What commands show to people. The only module that imports rich."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from skyrl_engine.run.progress import Progress

_SECONDS_BETWEEN_LINES = 30.0
_LINES_PER_RUN = 20
_PIPE_WIDTH = 10_000
_HEADER = f"{'step':>12}  {'loss':>8}  {'tokens/s':>9}  {'learning rate':>13}  {'gradient norm':>13}  {'left':>8}"


def _console(*, stderr: bool = False) -> Console:
    """A console on the stream of the moment; what goes into a pipe or a file is never wrapped or coloured."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, soft_wrap=not stream.isatty(), width=None if stream.isatty() else _PIPE_WIDTH)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows of plain values under column names, on stdout."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    _console().print(table)


def show_facts(facts: Mapping[str, Any]) -> None:
    """One `name  value` line each, on stdout."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(str(value)))
    _console().print(table)


@contextmanager
def show_progress(*, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """A listener for `ProgressObserver` that writes to stderr: lines now and then, and on a terminal a bar that moves with every step."""
    if quiet:
        yield _ignore
        return
    console = _console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(console.print)
        return
    with ProgressBar(
        BarColumn(bar_width=30), TextColumn("{task.description}"), console=console, transient=True, refresh_per_second=8
    ) as bar:
        task = bar.add_task("getting ready", total=None)
        lines = ProgressLines(console.print)

        def listen(progress: Progress) -> None:
            lines(progress)
            _move(bar, task, progress)

        yield listen


def _ignore(_: Progress) -> None:
    pass


def _move(bar: ProgressBar, task: TaskID, progress: Progress) -> None:
    bar.update(task, total=max(progress.total_steps, 1), completed=progress.step, description=str(progress))


class ProgressLines:
    """Writes a table line by line: about twenty steps of a run, at least one every half a minute, and every evaluation."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._last = Progress(0, 0)
        self._written_at = clock()
        self._header_written = False

    def __call__(self, progress: Progress) -> None:
        if progress.evaluation_loss is not None and progress.evaluation_loss != self._last.evaluation_loss:
            self._line(f"held-out loss {progress.evaluation_loss:.4f} after step {progress.step}")
        elif progress.step > self._last.step and progress.loss is not None and self._is_due(progress):
            self._line(progress_row(progress))
        self._last = progress

    def _is_due(self, progress: Progress) -> bool:
        interval = max(1, progress.total_steps // _LINES_PER_RUN)
        at_milestone = progress.step == 1 or progress.step % interval == 0 or progress.step == progress.total_steps
        return at_milestone or self._clock() - self._written_at >= _SECONDS_BETWEEN_LINES

    def _line(self, line: str) -> None:
        if not self._header_written:
            self._write(_HEADER)
            self._header_written = True
        self._write(line if line.startswith(" ") else f"{'':>12}  {line}")
        self._written_at = self._clock()


def progress_row(progress: Progress) -> str:
    """One step under the header; a dash where a number is not known."""
    position = f"{progress.step}/{progress.total_steps}"
    return "  ".join(
        (
            f"{position:>12}",
            _number(progress.loss, 8, ".4f"),
            _number(progress.tokens_per_second, 9, ",.0f"),
            _number(progress.learning_rate, 13, ".2e"),
            _number(progress.grad_norm, 13, ".4f"),
            f"{duration(progress.seconds_left):>8}",
        )
    )


def duration(seconds: float | None) -> str:
    """Seconds as 0:05, 12:34 or 1:02:03."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
