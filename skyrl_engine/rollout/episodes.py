"""Episodes of environments in processes of their own: dispatched, timed, ended where they hang, and tried again with the same seed.

An episode that loses its process, because another one in it hung or because it died, is rebuilt in the next one from its seed and the turns
that it was given; a rebuilt episode that answers otherwise than before has failed. A process is no sandbox.
"""

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
from attrs import define, field, frozen

from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.environment import Action, Message, StepResult, Task
from skyrl_engine.errors import RolloutError

logger = logging.getLogger(__name__)

_STUCK_S: Final = 1.0
"""Seconds after which a process that still works on one call no longer counts among the workers: another one is started beside it."""

_MORE: Final = 64
"""Most processes beside the workers."""

_LOGGED: Final = 2**16
"""Bytes of a process's output that reach the log."""


@frozen
class EpisodeReply:
    """The answer to `open` (`messages`), to `step` (`result`), or the `failure` of an episode, which is over then.

    `seconds` are those from the request to the answer.
    """

    episode: int
    messages: tuple[Message, ...] | None = None
    result: StepResult | None = None
    failure: str | None = None
    seconds: float = 0.0


@define(eq=False)
class _Episode:
    """What an episode was given and has answered, so that it can be rebuilt."""

    number: int
    environment: int
    label: str
    opening: dict[str, Any]
    actions: list[dict[str, Any]] = field(factory=list)
    answers: list[dict[str, Any]] = field(factory=list)
    tries: int = 0
    process: "_Process | None" = None
    rebuilt: int = 0
    """Answers that its process has given; fewer than `answers` while it is being rebuilt."""
    asked: float = 0.0

    @property
    def turn(self) -> str:
        return "begin" if not self.actions else f"step {len(self.actions)}"


class EpisodePool:
    """Runs episodes of several environments, given as the locks of their plugins.

    `workers` processes compute at once. A call that takes longer than `timeout_s` ends its process. An episode that failed is tried again
    `retries` times, with the same seed and turns. `shutdown` ends all processes.
    """

    def __init__(
        self,
        locks: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        context: FactoryContext,
        *,
        workers: int | None = None,
        timeout_s: float = 60.0,
        retries: int = 1,
    ) -> None:
        self._setup = _line({"locks": list(locks), "names": list(names), "context": attrs.asdict(context)})
        self._names = list(names)
        self._workers = workers or max(1, (os.cpu_count() or 2) - 1)
        self._timeout_s, self._retries = timeout_s, retries
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[_Episode] = deque()
        self._processes: list[_Process] = []
        self._replies: list[EpisodeReply] = []
        self._selector = selectors.DefaultSelector()
        self._drain = _Drain()

    @property
    def pending(self) -> int:
        """Count the episodes that owe an answer."""
        busy = sum(process.episode is not None for process in self._processes)
        return busy + len(self._waiting) + len(self._replies)

    def open(self, episode: int, environment: int, task: Task, seed: int) -> None:
        """Start an episode; `poll` brings its first messages."""
        opening = {"do": "open", "environment": environment, "task": attrs.asdict(task), "seed": seed}
        made = _Episode(episode, environment, f"environment {self._names[environment]}, task {task.key!r}", opening)
        self._episodes[episode] = made
        self._ask(made)

    def step(self, episode: int, action: Action) -> None:
        """Give an episode a turn; `poll` brings its answer."""
        made = self._episodes[episode]
        made.actions.append({"do": "step", "action": attrs.asdict(action)})
        self._ask(made)

    def close(self, episode: int) -> None:
        """Forget an episode, which frees what it holds."""
        made = self._episodes.pop(episode, None)
        if made is not None and made.process is not None:
            made.process.held.pop(episode, None)
            made.process.closing.append(episode)

    def poll(self, timeout: float) -> list[EpisodeReply]:
        """Return answers that are there, or that come within `timeout` seconds; several calls wait for several answers."""
        until = time.monotonic() + timeout
        while True:
            self._dispatch()
            if self._replies or not self._selector.get_map():
                break
            self._wait(max(0.0, min(until, self._next_event()) - time.monotonic()))
            if time.monotonic() >= until:
                self._dispatch()
                break
        replies, self._replies = self._replies, []
        return replies

    def shutdown(self) -> None:
        """End all processes."""
        for process in list(self._processes):
            self._end(process)
        self._selector.close()
        self._drain.close()

    def _ask(self, episode: _Episode) -> None:
        episode.asked = time.monotonic()
        self._waiting.append(episode)

    def _next_event(self) -> float:
        """Return the moment at which a call is too old, or its process no longer counts."""
        now = time.monotonic()
        moments = [now + 60.0]
        for process in self._processes:
            if process.episode is not None:
                moments.append(process.since + self._timeout_s)
                if self._waiting and process.ready and now < process.since + _STUCK_S:
                    moments.append(process.since + _STUCK_S)
        return min(moments)

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            self._read(key.data)
        now = time.monotonic()
        for process in list(self._processes):
            if process.episode is not None and now - process.since > self._timeout_s:
                self._lost(process, f"timed out after {self._timeout_s:g} s in {process.episode.turn}")

    def _dispatch(self) -> None:
        """Give waiting episodes to processes that have nothing to do."""
        later: deque[_Episode] = deque()
        while self._waiting:
            episode = self._waiting.popleft()
            if episode.number not in self._episodes or self._episodes[episode.number] is not episode:
                continue
            process = self._process_for(episode)
            if process is None:
                later.append(episode)
                if episode.process is None:
                    break
                continue
            self._send(process, episode)
        later.extend(self._waiting)
        self._waiting = later

    def _process_for(self, episode: _Episode) -> "_Process | None":
        """Return the process that holds the episode, or any that is free; None where it must wait."""
        if episode.process is not None:
            return episode.process if episode.process.episode is None else None
        free = [process for process in self._processes if process.episode is None]
        if free:
            return min(free, key=lambda process: len(process.held))
        now = time.monotonic()
        counted = sum(not process.ready or now - process.since < _STUCK_S for process in self._processes)
        if counted < self._workers and len(self._processes) < self._workers + _MORE:
            return self._start()
        return None

    def _start(self) -> "_Process":
        process = _Process.started(self._setup, self._drain)
        self._processes.append(process)
        self._selector.register(process.answers, selectors.EVENT_READ, process)
        return process

    def _send(self, process: "_Process", episode: _Episode) -> None:
        """Send the next call that the episode's process has not answered yet: those of before, where it is being rebuilt."""
        if episode.process is None:
            episode.process, episode.rebuilt = process, 0
            process.held[episode.number] = episode
        call = episode.opening if episode.rebuilt == 0 else episode.actions[episode.rebuilt - 1]
        try:
            process.send(episode, call)
        except OSError:
            self._lost(process, process.cause_of_end())

    def _read(self, process: "_Process") -> None:
        lines, ended = process.received()
        for answer in lines:
            if answer["id"] == process.awaited and process.episode is not None:
                episode, process.episode = process.episode, None
                self._answered(episode, answer)
            elif answer["id"] == -1 and "failure" not in answer:
                process.ready, process.since = True, time.monotonic()
            elif answer["id"] == -1:
                raise RolloutError(
                    f"an environment cannot be made in a process of its own: {answer['failure']}",
                    remedy="Check that the environment's plugin is installed where the run is, in the same version",
                )
        if ended:
            self._lost(process, process.cause_of_end())

    def _answered(self, episode: _Episode, answer: dict[str, Any]) -> None:
        told = {key: value for key, value in answer.items() if key in ("messages", "result", "failure")}
        if "failure" in told:
            if "traceback" in answer:
                logger.warning("%s: %s\n%s", episode.label, told["failure"], answer["traceback"])
            self._failed(episode, told["failure"])
            return
        if episode.rebuilt == len(episode.answers):
            episode.answers.append(told)
        elif told != episode.answers[episode.rebuilt]:
            self._over(episode, "answers otherwise when it is played again with the same seed and turns")
            return
        episode.rebuilt += 1
        if episode.rebuilt < 1 + len(episode.actions):
            self._waiting.appendleft(episode)
        else:
            self._replied(episode, told)

    def _replied(self, episode: _Episode, told: Mapping[str, Any]) -> None:
        seconds = time.monotonic() - episode.asked
        if "messages" in told:
            self._replies.append(EpisodeReply(episode.number, messages=tuple(told["messages"]), seconds=seconds))
        else:
            self._replies.append(EpisodeReply(episode.number, result=_result(told["result"]), seconds=seconds))

    def _failed(self, episode: _Episode, cause: str) -> None:
        """Try an episode again, in another process where there is one, or report its failure."""
        if episode.tries >= self._retries:
            self._over(episode, cause)
            return
        episode.tries += 1
        self._leave(episode)
        self._waiting.append(episode)

    def _over(self, episode: _Episode, cause: str) -> None:
        self._leave(episode)
        self._episodes.pop(episode.number, None)
        seconds = time.monotonic() - episode.asked
        self._replies.append(EpisodeReply(episode.number, failure=f"{episode.label}: {cause}", seconds=seconds))

    @staticmethod
    def _leave(episode: _Episode) -> None:
        if episode.process is not None:
            episode.process.held.pop(episode.number, None)
            episode.process.closing.append(episode.number)
        episode.process, episode.rebuilt = None, 0

    def _lost(self, process: "_Process", cause: str) -> None:
        """End a process: the episode it worked on has failed, the others it held are rebuilt when they are asked next."""
        culprit, process.episode = process.episode, None
        held = [each for each in process.held.values() if each is not culprit]
        self._end(process)
        for episode in held:
            episode.process, episode.rebuilt = None, 0
        if culprit is not None:
            culprit.process, culprit.rebuilt = None, 0
            self._failed(culprit, cause)

    def _end(self, process: "_Process") -> None:
        self._processes.remove(process)
        self._selector.unregister(process.answers)
        process.end()


@define(eq=False)
class _Process:
    """A process that answers one call at a time."""

    child: "subprocess.Popen[bytes]"
    requests: int
    answers: int
    held: dict[int, _Episode] = field(factory=dict)
    closing: list[int] = field(factory=list)
    episode: _Episode | None = None
    since: float = 0.0
    awaited: int = 0
    ready: bool = False
    """It has made the environments; until then a call waits for that, and not for an answer."""
    _buffer: bytes = b""

    @classmethod
    def started(cls, setup: bytes, drain: "_Drain") -> "_Process":
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
        os.set_blocking(answers_in, False)
        assert child.stdout is not None
        drain.take(child.stdout.fileno(), child.pid)
        child.stdout.close()
        process = cls(child, requests_out, answers_in)
        process._write(setup)
        return process

    def send(self, episode: _Episode, call: Mapping[str, Any]) -> None:
        """Send one call. Raises OSError where the process is gone."""
        for number in self.closing:
            self._write(_line({"id": 0, "do": "close", "episode": number}))
        self.closing.clear()
        self.awaited += 1
        self.episode, self.since = episode, time.monotonic()
        self._write(_line({**call, "id": self.awaited, "episode": episode.number}))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.requests, view) :]

    def received(self) -> tuple[list[dict[str, Any]], bool]:
        """Return whole answers that are there, and whether the process has closed its side."""
        ended = False
        while True:
            try:
                chunk = os.read(self.answers, 2**20)
            except BlockingIOError:
                break
            if not chunk:
                ended = True
                break
            self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines], ended

    def cause_of_end(self) -> str:
        """Say how the process ended."""
        turn = "" if self.episode is None else f" in {self.episode.turn}"
        try:
            code = self.child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"its process closed the connection{turn}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}{turn}"

    def end(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        for descriptor in (self.requests, self.answers):
            os.close(descriptor)


class _Drain:
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
        own = os.dup(descriptor)
        with self._lock:
            self._left[own] = _LOGGED
            self._selector.register(own, selectors.EVENT_READ, pid)
        os.write(self._wake_out, b".")

    def close(self) -> None:
        self._closed = True
        os.write(self._wake_out, b".")
        self._thread.join(timeout=5.0)

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
        left = self._left[descriptor]
        if left <= 0:
            return
        self._left[descriptor] = left - len(data)
        for line in data[:left].decode("utf-8", "replace").splitlines():
            logger.info("environment process %d: %s", pid, line)
        if self._left[descriptor] <= 0:
            logger.info("environment process %d prints more than %d bytes; the rest is left out", pid, _LOGGED)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, allow_nan=False, default=_numbers).encode() + b"\n"


def _numbers(value: Any) -> Any:
    """Plain values of NumPy's numbers, which token ids are."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _result(table: Mapping[str, Any]) -> StepResult:
    given = table["token_rewards"]
    return StepResult(**{**table, "messages": tuple(table["messages"]), "token_rewards": None if given is None else tuple(given)})
