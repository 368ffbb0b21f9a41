"""Signals: a request while a step can be finished, an end at once otherwise."""

import io
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_engine.run.stop import StopRequest, listen_for_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with listen_for_stop() as stop:
        assert not stop
        stop.can_wait = True
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal_name == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_before_the_training_loop_a_signal_ends_at_once() -> None:
    with listen_for_stop() as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not stop


def test_outside_the_main_thread_nothing_changes() -> None:
    seen: list[StopRequest] = []

    def listen() -> None:
        with listen_for_stop() as stop:
            seen.append(stop)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert len(seen) == 1
    assert signal.getsignal(signal.SIGINT) is before


@contextmanager
def hangup_set_to(disposition: signal.Handlers) -> Iterator[None]:
    """Set what SIGHUP does, whatever the process that runs these tests was started with."""
    before = signal.signal(signal.SIGHUP, disposition)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_lost_terminal_asks_as_well() -> None:
    with hangup_set_to(signal.SIG_DFL):
        with listen_for_stop() as stop:
            stop.can_wait = True
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal_name == "SIGHUP"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_sighup_that_is_ignored_stays_ignored() -> None:
    """`nohup` starts a command so."""
    with hangup_set_to(signal.SIG_IGN), listen_for_stop() as stop:
        stop.can_wait = True
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


class InterruptedFile(io.FileIO):
    """A file that a signal meets in the middle of its first write."""

    written = 0

    def write(self, content: object) -> int:
        self.written += 1
        if self.written == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(content)  # type: ignore[arg-type]


def test_a_signal_in_the_middle_of_a_line_of_the_log_is_logged_behind_it(tmp_path: Path) -> None:
    stream = io.TextIOWrapper(io.BufferedWriter(InterruptedFile(str(tmp_path / "run.log"), "w")))
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        with listen_for_stop() as stop:
            stop.can_wait = True
            logging.getLogger().warning("step 4")
            assert stop
    finally:
        logging.getLogger().removeHandler(handler)
        stream.close()
    assert (tmp_path / "run.log").read_text().splitlines() == [
        "step 4",
        "SIGTERM: the run ends after the current step, a second signal ends it at once",
    ]
