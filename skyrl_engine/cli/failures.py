"""End a command that failed: details, then one plain line with cause and remedy on stderr, and an exit code."""

import os
import select
import sys
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path

import click

from skyrl_engine.cli.command import CommandSettings
from skyrl_engine.cli.terminal import echo
from skyrl_engine.errors import EngineError
from skyrl_engine.visible import visible

USAGE = 2
RUNTIME = 4
INTERRUPTED = 130
BROKEN_PIPE = 141


def exit_code_of(error: BaseException, settings: CommandSettings) -> int:
    """Print what `error` means to a person and return the exit code of the process."""
    match error:
        case SystemExit():
            return error.code if isinstance(error.code, int) else RUNTIME
        case click.Abort() | KeyboardInterrupt():
            _finish(error, settings, "interrupted.")
            return INTERRUPTED
        case BrokenPipeError() if _reader_is_gone():
            return _leave_pipe()
        case click.UsageError():
            message = _sentence(error.format_message())
            command = error.ctx.command_path if error.ctx else "skyrl-engine"
            _finish(error, settings, f"error: {message} See `{command} --help`.")
            return USAGE
        case click.ClickException():
            _finish(error, settings, f"error: {_sentence(error.format_message())}")
            return USAGE
        case EngineError():
            where = () if settings.log is None else (f"the log: {settings.log}",)
            _finish(error, settings, f"error: {_one_line(_sentence(error.summary))}", (*error.details, *where))
            return error.exit_code
        case _:
            log = settings.log or _write_crash_log(error)
            summary = f"{type(error).__name__}: {_one_line(str(error)) or 'no message'}"
            place = f"The traceback is in {log}" if log else "No log could be written"
            again = "" if settings.debug else "; run again with --debug to see it here"
            _finish(error, settings, f"error: unexpected {_sentence(summary)} {place}{again}.")
            return RUNTIME


def _finish(error: BaseException, settings: CommandSettings, line: str, details: tuple[str, ...] = ()) -> None:
    if settings.debug:
        echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    for detail in details:
        echo(detail, err=True)
    echo(line, err=True)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _write_crash_log(error: BaseException) -> Path | None:
    """Write the traceback into a file of its own, in the user's log directory or in the temporary one."""
    from platformdirs import user_log_path

    name = f"failure-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}.log"
    for folder in (user_log_path("skyrl-engine"), Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / name
            path.write_text(
                visible(f"$ {' '.join(sys.argv)}\n{''.join(traceback.format_exception(error))}"),
                encoding="utf-8",
                # what is raised may hold half a character
                errors="backslashreplace",
            )
        except OSError:
            continue
        return path
    return None


def _reader_is_gone() -> bool:
    """Return True where our own output has lost its reader, and False where a pipe to some other process broke."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        try:
            poll.register(stream.fileno(), 0)
        except (OSError, ValueError):  # replaced by something that is no file, as tests do
            continue
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _leave_pipe() -> int:
    """End silently (`| head` has seen enough), and send the interpreter's last flush nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    return BROKEN_PIPE
