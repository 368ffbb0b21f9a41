"""Run a checked configuration with live progress, for `run`, `sft`, `rl` and `demo`."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

from skyrl_engine.cli.command import CommandSettings
from skyrl_engine.contracts.kinds.observer import SessionStarted
from skyrl_engine.hooks.markers import hookimpl
from skyrl_engine.run.log import TOLD, is_of_engine

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
        if self._settings.tell_log is not None:
            self._settings.tell_log(self._settings.log)


class SeldomCollected:
    """A context in which garbage is hardly collected, and an observer that ends it once the ranks are up.

    Imports make some hundred thousand objects that all live on; looking through them again and again is an eighth of a start's CPU time.
    """

    def __enter__(self) -> Self:
        self._usual = gc.get_threshold()
        gc.set_threshold(1_000_000, 50, 100)
        return self

    def __exit__(self, *raised: object) -> None:
        gc.set_threshold(*self._usual)
        gc.unfreeze()

    def leave_imports_out(self) -> None:
        """Leave all that exists now, which imports made, out of every collection while the context lasts."""
        gc.freeze()

    @hookimpl
    def skyrl_engine_session_started(self) -> None:
        gc.set_threshold(*self._usual)


class _ToPerson(logging.Handler):
    """A log handler that passes on every warning of the engine and its plugins, and what the engine tells, as a sentence."""

    def __init__(self, warn: Callable[[str], None], tell: Callable[[str], None] | None) -> None:
        super().__init__(logging.INFO)
        self._warn = warn
        self._tell = tell
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        return is_of_engine(record)

    def emit(self, record: logging.LogRecord) -> None:
        # Errors end in a line of their own; what several ranks warn of is shown once.
        if record.levelno == logging.WARNING and record.exc_info is None:
            said = getattr(record, "said", None)  # of ranks, see workers.rank_log
            if said is None or said not in self._shown:
                self._warn(record.getMessage())
            self._shown.add(record.getMessage() if said is None else said)
        elif self._tell is not None and getattr(record, TOLD, False):
            self._tell(record.getMessage())


@contextmanager
def warnings_to(warn: Callable[[str], None], tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Show warnings of the engine and its plugins, and what it tells, which otherwise are in the log alone, while a run goes on."""
    logger, handler = logging.getLogger(), _ToPerson(warn, tell)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def train(resolved: "ResolvedConfig", settings: CommandSettings, observers: Sequence[object] = ()) -> "RunResult":
    """Train, show progress on stderr unless `--quiet`, and return what the run returns."""
    from skyrl_engine.cli.render import show_progress
    from skyrl_engine.run.progress import ProgressObserver

    with (
        SeldomCollected() as collector,
        show_progress(quiet=settings.quiet) as display,
        warnings_to(display.warning, display.notice),
        calling_trainer(resolved, "run") as run,
    ):
        collector.leave_imports_out()
        result: RunResult = run(
            resolved,
            observers=[LogLocation(settings), ProgressObserver(display.training), collector, *observers],
            progress=display.data,
        )
    return result


@contextmanager
def calling_trainer(resolved: "ResolvedConfig", function: Literal["run", "plan"]) -> Iterator[Callable[..., Any]]:
    """Give the function of the run's trainer; what fails in the code of another distribution's trainer names it.

    Raises PluginBrokenError for such a failure; errors of the engine pass.
    """
    from skyrl_engine.config.find_trainer import get_trainer
    from skyrl_engine.config.trainers import TRAINERS
    from skyrl_engine.registry.owner import Owner, blame

    name = resolved.config.trainer
    trainer = get_trainer(name)
    load = trainer.load_run if function == "run" else trainer.load_plan
    if name in TRAINERS:
        yield load()
        return
    with blame(Owner(f"the trainer {name}", "Upgrade it, or choose another trainer"), function):
        yield load()
