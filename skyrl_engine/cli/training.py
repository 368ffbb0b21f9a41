"""Run a checked configuration with live progress, for `run`, `sft`, `rl` and `demo`."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from skyrl_engine.cli.command import CommandSettings
from skyrl_engine.contracts.kinds.observer import SessionStarted
from skyrl_engine.hooks.markers import hookimpl

if TYPE_CHECKING:
    from skyrl_engine.config import ResolvedConfig
    from skyrl_engine.training.loop import RunResult


class LogLocation:
    """An observer that remembers the path of the run's log, for the line that reports an unexpected failure."""

    def __init__(self, settings: CommandSettings) -> None:
        self._settings = settings

    @hookimpl
    def skyrl_engine_session_started(self, event: SessionStarted) -> None:
        from skyrl_engine.run.directory import RunDirectory

        self._settings.log = RunDirectory(event.directory).log


class _ToPerson(logging.Handler):
    """A log handler that passes every warning of the engine on as a sentence."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        # Errors end in a line of their own; what several ranks warn of is shown once.
        if record.levelno == logging.WARNING and record.exc_info is None and not getattr(record, "repeated", False):
            self._show(record.getMessage())


@contextmanager
def warnings_to(show: Callable[[str], None]) -> Iterator[None]:
    """Show the engine's warnings, which otherwise stand only in the log, while a run goes on."""
    logger, handler = logging.getLogger("skyrl_engine"), _ToPerson(show)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def train(resolved: "ResolvedConfig", settings: CommandSettings, observers: Sequence[object] = ()) -> "RunResult":
    """Train, show progress on stderr unless `--quiet`, and return what the run returns."""
    from skyrl_engine.cli.render import show_progress
    from skyrl_engine.config.trainers import TRAINERS
    from skyrl_engine.registry.kinds import imported
    from skyrl_engine.run.progress import ProgressObserver

    with show_progress(quiet=settings.quiet) as display, warnings_to(display.warning):
        result: RunResult = imported(TRAINERS[resolved.config.trainer].run)(
            resolved,
            observers=[LogLocation(settings), ProgressObserver(display.training), *observers],
            progress=display.data,
        )
    return result
