"""Run a checked configuration with live progress: what `run`, `sft` and `demo` share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyrl_engine.cli.command import Settings
from skyrl_engine.contracts.events import SessionStarted
from skyrl_engine.hooks.markers import hookimpl

if TYPE_CHECKING:
    from skyrl_engine.config import ResolvedConfig
    from skyrl_engine.training.sft import RunResult


class LogLocation:
    """An observer that remembers where the run's log is, for the line that reports an unexpected failure."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @hookimpl
    def skyrl_engine_session_started(self, event: SessionStarted) -> None:
        from skyrl_engine.run.directory import RunDirectory

        self._settings.log = RunDirectory(event.directory).log


def train(resolved: "ResolvedConfig", settings: Settings, observers: Sequence[object] = ()) -> "RunResult":
    """Train, show progress on stderr unless `--quiet`, and return what the run returns."""
    from skyrl_engine.cli.render import show_progress
    from skyrl_engine.run.progress import ProgressObserver
    from skyrl_engine.training.sft import run_sft

    with show_progress(quiet=settings.quiet) as display:
        return run_sft(
            resolved,
            observers=[LogLocation(settings), ProgressObserver(display.training), *observers],
            progress=display.data,
        )
