"""The lock of a run directory says who works there, and nobody where that process was killed."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_engine.errors import EngineError
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.lock import LockHolder, LockView, look_at_lock
from skyrl_engine.run.state import judge_state


@contextmanager
def another_process_in(directory: RunDirectory) -> Iterator[int]:
    """Let a process hold the directory until it is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - another process
        with directory.lock():
            os.write(writing, b"held")
            signal.pause()
    os.read(reading, 4)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_a_held_lock_names_its_process_and_a_killed_process_holds_none(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert look_at_lock(directory.lock_file) == LockView("free")
    with another_process_in(directory) as pid:
        view = look_at_lock(directory.lock_file)
        assert view.status == "held"
        assert view.holder is not None
        assert view.holder.pid == pid
        with pytest.raises(EngineError, match=rf"another process is running in .*: process {pid} on "), directory.lock():
            pass
        assert look_at_lock(directory.lock_file) == view  # whoever was refused has not written its own name
    assert look_at_lock(directory.lock_file) == LockView("free", view.holder)
    with directory.lock("prune"):
        assert json.loads(directory.lock_file.read_text())["work"] == "prune"
    assert directory.lock_file.read_text() == ""


def test_looking_keeps_nobody_from_taking_a_lock(tmp_path: Path) -> None:
    directory, done = RunDirectory(tmp_path), threading.Event()

    def look() -> None:
        while not done.is_set():
            look_at_lock(directory.lock_file)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with directory.lock():
                pass
    finally:
        done.set()
        looking.join()


def test_a_process_of_another_host_cannot_be_checked(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    lock.write_text(json.dumps({"host": "gpu-7", "pid": 12, "since": "2026-01-01T00:00:00+00:00", "work": "run"}))
    view = look_at_lock(lock)
    assert view.status == "unknown"
    state = judge_state([{"started": "2026-01-01T00:00:00+00:00", "finished": None}], view, step=3, total_steps=9)
    assert str(state) == "unknown: no end is recorded, and process 12 on gpu-7 cannot be checked from here"


HOLDER = LockHolder("here", 12, "2026-01-02T00:00:00+00:00")
OPEN = {"finished": None, "error": None}
ENDED = {"finished": "2026-01-01T00:00:00+00:00", "error": None}


@pytest.mark.parametrize(
    ("sessions", "lock", "step", "word"),
    [
        ([], LockView("free"), 0, "never started"),
        ([], LockView("held", HOLDER), 0, "starting"),
        ([OPEN], LockView("held", HOLDER), 3, "running"),
        ([OPEN], LockView("held"), 3, "running"),
        ([OPEN], LockView("free", HOLDER), 3, "killed"),
        ([OPEN], LockView("unknown"), 3, "unknown"),
        ([ENDED], LockView("free"), 3, "stopped"),
        ([ENDED], LockView("free"), 9, "ended"),
        ([ENDED], LockView("unknown"), 9, "ended"),
        # the lock was taken after that end: a session is being prepared
        ([ENDED], LockView("held", HOLDER), 3, "starting"),
        # the process that ended the session writes its last report
        ([ENDED], LockView("held", LockHolder("here", 12, "2025-12-31T00:00:00+00:00")), 9, "ended"),
        ([ENDED], LockView("held", LockHolder("here", 12, "2026-01-02T00:00:00+00:00", "prune")), 9, "ended"),
        ([{**ENDED, "error": "no memory"}], LockView("free"), 3, "failed"),
        ([{**ENDED, "error": "no memory"}, OPEN], LockView("held", HOLDER), 3, "running"),
    ],
)
def test_the_state_is_that_of_the_last_session_and_of_the_lock(sessions, lock, step, word):
    assert judge_state(sessions, lock, step=step, total_steps=9).word == word
