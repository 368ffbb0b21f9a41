"""Output to a terminal that may go away, with its window or its connection, while a run goes on."""

import errno
import io
import os
import sys
from typing import Any


class _Terminal(io.FileIO):
    """A terminal's file. Where the terminal is gone, what is written from then on goes nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return super().write(data)


def outlive_terminals() -> None:
    """Let stdout and stderr, where they are terminals, survive their loss: a run ends after its step then, with a checkpoint."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty() and isinstance(stream, io.TextIOWrapper):
            file = io.BufferedWriter(_Terminal(stream.fileno(), "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, encoding=stream.encoding, errors=stream.errors, line_buffering=True))
