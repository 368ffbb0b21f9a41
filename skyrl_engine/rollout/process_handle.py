"""The controller's side of one process of environments: its pipes, what it was asked, and what it prints."""

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import attrs
from attrs import define, field

from skyrl_engine.contracts.kinds.environment import Task
from skyrl_engine.errors import RolloutError

logger = logging.getLogger(__name__)

_ASLEEP_S: Final = 0.05
_STUCK_S: Final = 1.0
"""Seconds after which a process that still works on one call, the former where it sleeps, no longer counts among the workers: another one is
started next to it."""

_LOGGED: Final = 2**16
"""Bytes of a process's output that reach the log."""


@define(eq=False)
class HostedEpisode:
    """Calls and answers of an episode so far, from which it can be rebuilt."""

    number: int
    environment: int
    label: str
    opening: dict[str, Any]
    actions: list[dict[str, Any]] = field(factory=list)
    answers: list[dict[str, Any]] = field(factory=list)
    tries: int = 0
    process: "EpisodeProcess | None" = None
    rebuilt: int = 0
    """Answers that its process has given; fewer than `answers` while it is being rebuilt."""
    asked_at: float = 0.0

    @property
    def turn(self) -> str:
        """Name the call that its process works on, which may be one of before while it is being rebuilt."""
        return f"step {self.rebuilt}" if self.rebuilt else "compare" if self.opening["do"] == "compare" else "begin"


@define(eq=False)
class EpisodeProcess:
    """A process that answers one call at a time."""

    child: "subprocess.Popen[bytes]"
    requests: int
    answers: int
    held: dict[int, HostedEpisode] = field(factory=dict)
    waiting: deque[HostedEpisode] = field(factory=deque)
    """Episodes that it holds and that were given a turn, in that order."""
    closing: list[HostedEpisode] = field(factory=list)
    unclosed: deque[str] = field(factory=deque)
    """Labels of the episodes that it was asked to close and has not closed yet."""
    episode: HostedEpisode | None = None
    since: float = 0.0
    awaited: int = 0
    ready: bool = False
    """It has made the environments; until then a call waits for that, and not for an answer."""
    _outgoing: bytearray = field(factory=bytearray)
    _incoming: bytearray = field(factory=bytearray)

    @property
    def busy(self) -> bool:
        """Return True where the process owes an answer."""
        return self.episode is not None or len(self.unclosed) > 0

    @property
    def place(self) -> str:
        """Say what the process works on; a label says it where that is to close an episode."""
        if not self.ready:
            return " before its environments were made"
        return "" if self.episode is None or self.unclosed else f" in {self.episode.turn}"

    @classmethod
    def start(cls, setup: bytes, drain: "Drain") -> "EpisodeProcess":
        requests_in, requests_out = os.pipe()
        answers_in, answers_out = os.pipe()
        command = [sys.executable, "-m", "skyrl_engine.rollout.episode_process", str(requests_in), str(answers_out)]
        child = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(requests_in, answers_out),
            start_new_session=True,
        )
        os.close(requests_in)
        os.close(answers_out)
        for descriptor in (answers_in, requests_out):
            os.set_blocking(descriptor, False)
        assert child.stdout is not None
        drain.take(child.stdout.fileno(), child.pid)
        child.stdout.close()
        process = cls(child, requests_out, answers_in)
        process._outgoing += setup
        return process

    def send(self, episode: HostedEpisode, call: Mapping[str, Any]) -> None:
        """Give the process one call; `flush` writes it."""
        self.tell_closed()
        self.awaited += 1
        self.episode, self.since = episode, time.monotonic()
        self._outgoing += json_line({**call, "id": self.awaited, "episode": episode.number})

    def tell_closed(self) -> None:
        """Tell the process of the episodes that are over; `flush` writes it."""
        if self.closing and not self.busy:
            self.since = time.monotonic()
        for episode in self.closing:
            self._outgoing += json_line({"id": 0, "do": "close", "episode": episode.number})
            self.unclosed.append(episode.label)
        self.closing.clear()

    def flush(self) -> bool:
        """Write as much as the process takes now; return True where nothing is left. Raises OSError where the process is gone."""
        while self._outgoing:
            try:
                written = os.write(self.requests, memoryview(self._outgoing)[: 2**20])
            except BlockingIOError:
                return False
            del self._outgoing[:written]
        return True

    def looks(self, now: float) -> list[float]:
        """Return the moments to come at which its call may turn out to be `stuck`."""
        return [self.since + after for after in (_ASLEEP_S, _STUCK_S) if now < self.since + after]

    def is_stuck(self, now: float) -> bool:
        """Return True where the process is taken up by a call, so that another one may compute."""
        seconds = now - self.since
        return self.ready and (seconds >= _STUCK_S or (seconds >= _ASLEEP_S and _sleeps(self.child.pid)))

    def receive_lines(self) -> tuple[list[bytes], bool]:
        """Return whole lines that are there, and whether the process has closed its side."""
        start, ended = len(self._incoming), False
        while True:
            try:
                chunk = os.read(self.answers, 2**20)
            except BlockingIOError:
                break
            if not chunk:
                ended = True
                break
            self._incoming += chunk
        end = self._incoming.rfind(b"\n", start) + 1
        lines = bytes(self._incoming[:end]).splitlines()
        del self._incoming[:end]
        return lines, ended

    def cause_of_end(self) -> str:
        """Say how the process ended."""
        try:
            code = self.child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"its process closed the connection{self.place}"
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {ending}{self.place}"

    def finish(self) -> None:
        """Let the process close what it holds and end by itself."""
        with suppress(OSError):
            self.flush()
        with suppress(OSError):
            os.close(self.requests)
        self.requests = -1

    def wait_for_end(self, seconds: float) -> None:
        """Wait so long for the process to end."""
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=max(0.0, seconds))

    def end(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        for descriptor in (self.requests, self.answers):
            if descriptor >= 0:
                os.close(descriptor)


class Drain:
    """Reads what processes print, so that none waits for a reader; the first part of it goes to the log."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wake_in, self._wake_out = os.pipe()
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._left: dict[int, int] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="output of environments", daemon=True)
        self._thread.start()

    def take(self, descriptor: int, pid: int) -> None:
        """Read this descriptor, of a process, until it ends."""
        duplicate = os.dup(descriptor)
        with self._lock:
            self._left[duplicate] = _LOGGED
            self._selector.register(duplicate, selectors.EVENT_READ, pid)
        os.write(self._wake_out, b".")

    def close(self) -> None:
        """Stop reading."""
        self._closed = True
        os.write(self._wake_out, b".")
        self._thread.join(timeout=5.0)
        self._selector.close()
        for descriptor in (*self._left, self._wake_in, self._wake_out):
            os.close(descriptor)

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(1.0):
                data = os.read(key.fd, 2**16)
                if key.data is None:
                    continue
                if data:
                    self._log(key.fd, key.data, data)
                    continue
                with self._lock:
                    self._selector.unregister(key.fd)
                    self._left.pop(key.fd)
                os.close(key.fd)

    def _log(self, descriptor: int, pid: int, data: bytes) -> None:
        remainder = self._left[descriptor]
        if remainder <= 0:
            return
        self._left[descriptor] = remainder - len(data)
        for line in data[:remainder].decode("utf-8", "replace").splitlines():
            logger.info("environment process %d: %s", pid, line)
        if self._left[descriptor] <= 0:
            logger.info("environment process %d prints more than %d bytes; the rest is left out", pid, _LOGGED)


def _sleeps(pid: int) -> bool:
    """Return True where a process waits for something and does not compute, as far as the system says so."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 -- in the loop of every rollout
            return file.read().rpartition(b")")[2].split()[0] == b"S"
    except (OSError, IndexError):
        return False


def answer_of(line: bytes) -> dict[str, Any] | None:
    """Return an answer; None for what is none, which an environment wrote where it does not belong."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("id"), int) else None


def json_line(value: Mapping[str, Any]) -> bytes:
    """Return the value as a line of JSON; numbers of NumPy are written as Python's. Raises ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False, default=_numbers).encode() + b"\n"


def refuse_unsendable(task: Task, name: str) -> None:
    """Refuse a task that cannot be sent to the environment's process. Raises RolloutError with its `name`."""
    try:
        json_line(attrs.asdict(task))
    except (TypeError, ValueError) as error:
        raise unsendable_error(name, error) from error


def unsendable_error(name: str, error: Exception) -> RolloutError:
    """Return the error for a task that is no JSON."""
    return RolloutError(
        f"{name}: what it holds cannot be sent to the environment's process: {error}",
        remedy="Make tasks of plain JSON values: texts, finite numbers, lists and dictionaries",
    )


def _numbers(value: Any) -> Any:
    """Plain values of NumPy's numbers, which token ids are."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")
