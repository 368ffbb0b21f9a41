"""A run with ranks of Ray in a process of its own, under one that says how it ended.

Ray ends the process that uses it, with exit code 1 and without an exception, where its raylet dies in the middle of a call
(`workers/ray_watch.py` notices its death before the next one). What is above sees that exit code, which no run has by itself, and says what
a dead rank's failure would: a line, an exit code, and an entry in `run.log` and `run.json`.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
from attrs import define

from skyrl_engine.cli.command import CommandSettings
from skyrl_engine.errors import WorkerError

ENDED_BY_RAY: Final = 1
"""The exit code with which Ray ends a process. Commands that train or evaluate have 0, 2, 3, 4, 130 and 141."""

_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of prctl(2): the signal that a process gets when the one above it dies."""


@define
class _Above:
    """The process above the run: it waits, passes on what it is sent, and ends as the run does."""

    run: int
    log_pipe: int

    def wait(self) -> int:
        """Return the status of the run's process, as os.waitpid gives it."""
        passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCHLD}
        while True:
            number = signal.Signals(signal.sigwait(passed_on))
            if number is not signal.SIGCHLD:
                self._pass_on(number)
                continue
            ended, status = os.waitpid(self.run, os.WNOHANG)
            if ended:
                return status

    def _pass_on(self, number: signal.Signals) -> None:
        # not yet waited for, so that the id is still the run's
        os.kill(self.run, number)
        if number is signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(self.run, signal.SIGCONT)

    def log(self) -> Path | None:
        """Return the log that the run has named; None where it has not come so far."""
        os.set_blocking(self.log_pipe, False)
        try:
            text = os.read(self.log_pipe, 1 << 16)
        except BlockingIOError:
            return None
        return Path(os.fsdecode(text)) if text else None


def run_under_watch(settings: CommandSettings, *, ranks: int, joined: bool) -> None:
    """Return in a new process, which is to run, where this one is a command's own; this one then waits and ends as that ends.

    `joined` says that the cluster is somebody else's. Raises click's Exit with the run's exit code, and WorkerError where Ray ended the run.
    """
    if not settings.owns_process or sys.platform != "linux":
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    reading_end, writing_end = os.pipe()
    with _block_signals():
        above = os.getpid()
        process = os.fork()
        if process == 0:
            os.close(reading_end)
            _become_the_run(settings, writing_end, above)
        else:
            os.close(writing_end)
            watcher = _Above(process, reading_end)
            code = os.waitstatus_to_exitcode(watcher.wait())
    if process == 0:
        return
    settings.log = watcher.log()
    if code < 0:
        _die_by(-code)
    if code == ENDED_BY_RAY:
        raise _describe_end_by_ray(settings.log, ranks, joined=joined)
    raise click.exceptions.Exit(code)


@contextmanager
def _block_signals() -> Iterator[None]:
    """Hold signals back: what comes before the run's process is there is passed on to it."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGCHLD}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.add(signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_the_run(settings: CommandSettings, writing_end: int, above: int) -> None:
    """Make the new process the run's: it dies with the one above, and no signal that is passed on reaches it twice."""
    settings.owns_process = False
    settings.tell_log = lambda path: os.write(writing_end, os.fsencode(path.absolute()))
    # a terminal sends its signals to a whole group
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != above:
        os.kill(os.getpid(), signal.SIGKILL)


def _die_by(number: int) -> None:
    """End this process by the signal that ended the run's."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _describe_end_by_ray(log: Path | None, ranks: int, *, joined: bool) -> WorkerError:
    """Return the failure of a run whose process Ray ended, after it is recorded."""
    from skyrl_engine.run.session import record_failure
    from skyrl_engine.workers.rank_log import ranks_in_words

    error = WorkerError(
        f"Ray's raylet on this machine ended during a call, with which Ray ended the run, and {ranks_in_words(range(ranks))} with it",
        rank=None,
        remedy="Look for lack of memory or a signal there"
        + (" and start Ray again" if joined else "")
        + ", then resume from the latest checkpoint",
    )
    if log is not None:
        record_failure(log.parent, error)
    return error
