"""Everything that a rank prints, logs or warns: caught in the rank's process, and read by an actor next to it on the same node.

The rank's standard output and error become one file, at the level of descriptors, so that libraries in C are caught too. Reading is left to
another process, because the last lines of a rank that dies matter most, and they are in the file whatever ended the rank. The reader deletes
the file's folder as soon as it has the file open; one that nobody came to read is deleted after a week (`scratch`).
"""

import ctypes
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from skyrl_engine.scratch import ScratchFolder, delete_file

RECORD = "\x1e"
"""The character before a record of logging, which is one line of JSON; a line without it was printed."""

WARNINGS = "warnings"
"""The logger's name of what `warnings.warn` said."""

PAUSE_SECONDS = 0.1
"""A reader pauses so long before it looks for new lines."""

CHUNK_BYTES = 1 << 20
"""The most that is read of one rank at a time; a flood waits on the disk."""


_kept: list[ScratchFolder] = []
"""The folders of this process' output, which live as long as it does."""


class RecordsToOutput(logging.Handler):
    """Writes every record as a line of JSON to the standard error descriptor, past all buffers."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a full disk
            values = {"level": record.levelno, "name": record.name, "message": self.format(record), "time": record.created}
            os.write(2, f"{RECORD}{json.dumps(values)}\n".encode())

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Print nothing: the message could not be formatted, and what tried to log it goes on."""


def capture() -> str:
    """Turn this process's output, log and warnings into a new file; returns its path.

    A line is written as soon as it ends, so that a process that is killed loses none.
    """
    folder = ScratchFolder("rank")
    path = str(folder.path / "output")
    # the reader may come after this process has ended
    folder.keep()
    _kept.append(folder)
    redirect_output(path)
    root = logging.getLogger()
    root.addHandler(RecordsToOutput())
    root.setLevel(logging.INFO)
    warnings.showwarning = _log_warning
    return path


def redirect_output(path: str) -> None:
    """Write this process's output to the end of a file, which is made if it is not there, as soon as a line ends."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Appending, as several descriptors write to it.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = _by_line(1), _by_line(2)
    _c_output_by_line()


def _by_line(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _c_output_by_line() -> None:
    """Have C's `printf` write whole lines too: into a file it would keep pages, which a killed process loses."""
    # _IOLBF of <stdio.h>
    line_buffered = 1
    name = "stdout" if sys.platform == "linux" else "__stdoutp"
    with suppress(AttributeError, OSError, ValueError):
        library = ctypes.CDLL(None)
        library.setvbuf(ctypes.c_void_p.in_dll(library, name), None, line_buffered, 0)


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    if file is not None:
        file.write(warnings.formatwarning(message, category, filename, lineno, line))
        return
    logging.getLogger(WARNINGS).warning("%s: %s (%s, line %d)", category.__name__, message, filename, lineno)


class OutputReader:
    """Reads the files of the ranks of one node. An actor with two threads: `read` waits for lines while `stop` is called."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self._stopping = threading.Event()
        self._files: dict[int, int] = {}
        for rank, path in paths.items():
            self._files[rank] = os.open(path, os.O_RDONLY)
            delete_file(Path(path))

    def read(self) -> dict[int, bytes]:
        """Wait for output; returns what is new by rank. Nothing, once `stop` was called and all is read."""
        while True:
            # Asked before reading: what is written until then is read in any case.
            last = self._stopping.is_set()
            chunks = {rank: os.read(file, CHUNK_BYTES) for rank, file in self._files.items()}
            if new := {rank: text for rank, text in chunks.items() if text}:
                return new
            if last:
                return {}
            time.sleep(PAUSE_SECONDS)

    def stop(self) -> None:
        """End the waiting of `read`."""
        self._stopping.set()

    def is_here(self) -> bool:
        """Answer, which the reader of a lost node does not."""
        return True


class Lines:
    """Puts the output of one rank together again: printed lines, and records of logging as they were."""

    LONGEST = 1 << 16

    def __init__(self) -> None:
        self._rest = b""

    def add(self, text: bytes) -> list[logging.LogRecord]:
        """Return the records that `text` completes."""
        *lines, self._rest = (self._rest + text).split(b"\n")
        if len(self._rest) > self.LONGEST:
            lines.append(self._rest)
            self._rest = b""
        return [record for line in lines for record in _records(line.decode(errors="replace"))]

    def end(self) -> list[logging.LogRecord]:
        """Return what the last line holds, which nothing ended."""
        return self.add(b"\n") if self._rest else []


def _records(line: str) -> list[logging.LogRecord]:
    printed, mark, written = line.partition(RECORD)
    records = []
    # A progress bar goes back to the start of its line again and again: its last state counts.
    if shown := printed.rstrip("\r").rpartition("\r")[2].rstrip():
        records.append(_record(shown))
    if mark:
        try:
            records.append(_record(**json.loads(written)))
        except (ValueError, TypeError):  # a torn last line
            records.append(_record(written))
    return records


def _record(message: str, level: int = logging.INFO, name: str = "output", time: float | None = None) -> logging.LogRecord:
    values: dict[str, Any] = {
        "name": name,
        "levelno": level,
        "levelname": logging.getLevelName(level),
        "msg": message,
        "args": None,
    }
    record = logging.makeLogRecord(values)
    if time is not None:
        record.created, record.msecs = time, time % 1 * 1000
    return record
