"""A rank's output is caught from C up, read while it runs, and kept whatever ends it."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_engine.workers.rank_output import Lines, OutputReader

NOISE = """
import ctypes, logging, os, signal, sys, warnings
from skyrl_engine.workers.rank_output import capture
os.write(3, capture().encode())
os.close(3)
libc = ctypes.CDLL(None)
print("printed")
print("to stderr", file=sys.stderr)
libc.printf(b"from C\\n")
os.system("echo from a child")
logging.getLogger("somebody").info("of %d", 7)
logging.getLogger("somebody").debug("chatter")
warnings.warn("careful")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("skyrl_engine.x").exception("broken")
print("10 %\\r20 %\\r30 %")
print("half", end="", flush=True)
logging.getLogger("somebody").warning("between")
print("the last line")
"""


def read_from(script: str, ending: str) -> list[logging.LogRecord]:
    """Run a script that catches its output, ended by its last statement, and read it."""
    receive, send = os.pipe()
    code = f"import os; os.dup2({send}, 3)\n{script}\n{ending}"
    ended = subprocess.run([sys.executable, "-c", code], pass_fds=(send,), capture_output=True, check=False)
    os.close(send)
    path = os.read(receive, 4096).decode()
    os.close(receive)
    assert (ended.stdout, ended.stderr) == (b"", b"")
    reader = OutputReader({5: path})
    assert not Path(path).parents[1].exists(), "nothing is left behind"
    reader.stop()
    lines, records = Lines(), []
    while new := reader.read():
        records += lines.add(new[5])
    return [*records, *lines.end()]


@pytest.mark.parametrize("ending", ["", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "libc.abort()"])
def test_every_way_to_say_something_arrives_whatever_ends_the_process(ending: str) -> None:
    records = read_from(NOISE, ending)
    said = [(record.levelname, record.name, record.msg.partition("\n")[0]) for record in records]
    assert said[:5] == [
        ("INFO", "output", "printed"),
        ("INFO", "output", "to stderr"),
        ("INFO", "output", "from C"),
        ("INFO", "output", "from a child"),
        ("INFO", "somebody", "of 7"),
    ]
    assert said[5] == ("WARNING", "warnings", "UserWarning: careful (<string>, line 14)")
    assert said[6:] == [
        ("ERROR", "skyrl_engine.x", "broken"),
        ("INFO", "output", "30 %"),
        ("INFO", "output", "half"),
        ("WARNING", "somebody", "between"),
        ("INFO", "output", "the last line"),
    ]
    assert "ZeroDivisionError: division by zero" in records[6].msg


def test_lines_are_put_together_again_however_they_were_cut() -> None:
    text = b"one\ntwo \xff\n\x1e{torn\nthree"
    whole = [record.msg for record in Lines().add(text)]
    lines = Lines()
    cut = [record.msg for byte in range(len(text)) for record in lines.add(text[byte : byte + 1])]
    assert cut == whole == ["one", "two \N{REPLACEMENT CHARACTER}", "{torn"]
    assert [record.msg for record in lines.end()] == ["three"]
    assert lines.end() == []


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    lines = Lines()
    assert [len(record.msg) for record in lines.add(b"x" * (Lines.LONGEST + 1))] == [Lines.LONGEST + 1]
