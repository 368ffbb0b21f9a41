"""Episodes of environments in processes of their own: dispatched, timed, ended where they hang, and tried again with the same seed.

An episode that loses its process, because another one in it hung or because it died, is rebuilt in the next one from its seed and the turns
that it was given; a rebuilt episode that answers otherwise than before has failed. A process is no sandbox.
"""

import json
import logging
import math
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

_ASLEEP_S: Final = 0.05
_STUCK_S: Final = 1.0
"""Seconds after which a process that still works on one call, the former where it sleeps, no longer counts among the workers: another one is
started beside it."""

_START_S: Final = 120.0
"""Seconds that a process may take to make its environments, beyond the time of a call."""

_PATIENCE_S: Final = 2.0
"""Seconds in which processes may close their episodes in the end."""

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
    """Calls and answers of an episode so far, from which it can be rebuilt."""

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
        """Name the call that its process works on, which may be one of before while it is being rebuilt."""
        return f"step {self.rebuilt}" if self.rebuilt else "begin"


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
        self._setup = _line({"locks": list(locks), "context": attrs.asdict(context)})
        self._names = list(names)
        self._workers = workers or max(1, (os.cpu_count() or 2) - 1)
        self._timeout_s, self._retries = timeout_s, retries
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[_Episode] = deque()
        self._processes: list[_Process] = []
        self._replies: list[EpisodeReply] = []
        self._selector = selectors.DefaultSelector()
        self._drain = _Drain()
        self._to_tell: set[_Process] = set()
        # no call is too old before this moment
        self._alarm = math.inf
        # an episode waits for any process
        self._short = False

    @property
    def pending(self) -> int:
        """Count the episodes that owe an answer."""
        busy = sum(process.episode is not None for process in self._processes)
        waiting = len(self._waiting) + sum(len(process.waiting) for process in self._processes)
        return busy + waiting + len(self._replies)

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
        if made is not None:
            self._leave(made)

    def poll(self, timeout: float) -> list[EpisodeReply]:
        """Return answers that are there, or that come within `timeout` seconds; several calls wait for several answers."""
        until = time.monotonic() + timeout
        # a process whose answer lies there already is not stuck, however long nobody asked for it
        self._wait(0.0)
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
        """Let idle processes close their episodes, and end all."""
        until = time.monotonic() + _PATIENCE_S
        idle = [process for process in self._processes if process.episode is None and process.ready]
        for process in idle:
            if process.requests in self._selector.get_map():
                self._selector.unregister(process.requests)
            process.finish()
        for process in idle:
            process.ended(until - time.monotonic())
        for process in list(self._processes):
            self._end(process)
        self._selector.close()
        self._drain.close()

    def _ask(self, episode: _Episode) -> None:
        episode.asked = time.monotonic()
        (self._waiting if episode.process is None else episode.process.waiting).append(episode)

    def _next_event(self) -> float:
        """Return the moment at which a call may be too old, or its process may no longer count."""
        now = time.monotonic()
        moments = [now + 60.0, self._alarm]
        if self._short:
            for process in self._processes:
                if process.busy and process.ready:
                    moments += [process.since + after for after in (_ASLEEP_S, _STUCK_S) if now < process.since + after]
        return min(moments)

    def _allowed(self, process: "_Process") -> float:
        return self._timeout_s if process.ready else self._timeout_s + _START_S

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            process = key.data
            if process not in self._processes:
                continue
            if key.fd == process.answers:
                self._read(process)
            else:
                self._write(process)
        if time.monotonic() >= self._alarm:
            self._end_late_calls()

    def _end_late_calls(self) -> None:
        now, self._alarm = time.monotonic(), math.inf
        for process in [each for each in self._processes if each.busy]:
            allowed = self._allowed(process)
            if now - process.since > allowed:
                self._lost(process, f"timed out after {allowed:g} s{process.place}")
            else:
                self._alarm = min(self._alarm, process.since + allowed)

    def _dispatch(self) -> None:
        """Give waiting episodes to processes that have nothing to do: first those that they hold."""
        for process in list(self._processes):
            while process.episode is None and process.waiting:
                episode = process.waiting.popleft()
                if self._is_open(episode):
                    self._send(process, episode)
        self._short = False
        while self._waiting and not self._short:
            if not self._is_open(self._waiting[0]):
                self._waiting.popleft()
            elif (free := self._free_process()) is not None:
                self._send(free, self._waiting.popleft())
            else:
                self._short = True
        for process in [each for each in self._to_tell if each.episode is None]:
            self._to_tell.discard(process)
            process.tell_closed()
            self._alarm = min(self._alarm, process.since + self._allowed(process))
            self._write(process)

    def _free_process(self) -> "_Process | None":
        """Return a process for an episode that none holds; None where it must wait."""
        now = time.monotonic()
        # one that closes an episode is free at once, unless that takes long
        free = [each for each in self._processes if each.episode is None and not (each.unclosed and each.stuck(now))]
        if free:
            return min(free, key=lambda process: (len(process.unclosed) > 0, len(process.held)))
        counted = sum(not process.stuck(now) for process in self._processes)
        if counted < self._workers and len(self._processes) < self._workers + _MORE:
            return self._start()
        return None

    def _start(self) -> "_Process":
        process = _Process.started(self._setup, self._drain)
        self._processes.append(process)
        self._selector.register(process.answers, selectors.EVENT_READ, process)
        self._write(process)
        return process

    def _send(self, process: "_Process", episode: _Episode) -> None:
        """Send the next call that the episode's process has not answered yet: those of before, where it is being rebuilt."""
        if episode.process is None:
            episode.process, episode.rebuilt = process, 0
            process.held[episode.number] = episode
        call = episode.opening if episode.rebuilt == 0 else episode.actions[episode.rebuilt - 1]
        process.send(episode, call)
        self._alarm = min(self._alarm, process.since + self._allowed(process))
        self._write(process)

    def _write(self, process: "_Process") -> None:
        """Write what the process is to be told, as far as it takes it now."""
        try:
            all_told = process.flush()
        except OSError:
            self._lost(process, process.cause_of_end())
            return
        registered = process.requests in self._selector.get_map()
        if all_told and registered:
            self._selector.unregister(process.requests)
        elif not all_told and not registered:
            self._selector.register(process.requests, selectors.EVENT_WRITE, process)

    def _read(self, process: "_Process") -> None:
        lines, ended = process.received()
        for line in lines:
            answer = _answer(line)
            if answer is None:
                self._lost(process, f"its process wrote what is no answer{process.place}")
                return
            if answer["id"] == 0 and process.unclosed:
                self._closed(process, answer)
            elif answer["id"] == process.awaited and process.episode is not None:
                episode, process.episode = process.episode, None
                self._answered(episode, answer)
            elif answer["id"] == -1 and "failure" not in answer:
                process.ready, process.since = True, time.monotonic()
                self._alarm = min(self._alarm, process.since + self._timeout_s)
            elif answer["id"] == -1:
                raise RolloutError(
                    f"an environment cannot be made in a process of its own: {answer['failure']}",
                    remedy="Check that the environment's plugin is installed where the run is, in the same version",
                )
        if ended:
            self._lost(process, process.cause_of_end())

    def _closed(self, process: "_Process", answer: Mapping[str, Any]) -> None:
        """Take note that a process closed an episode; the time of the call behind that begins now."""
        label = process.unclosed.popleft()
        process.since = time.monotonic()
        if "failure" in answer:
            logger.warning("%s, close: %s\n%s", label, answer["failure"], answer.get("traceback", ""))

    def _answered(self, episode: _Episode, answer: dict[str, Any]) -> None:
        if not self._is_open(episode):
            return
        told = {key: value for key, value in answer.items() if key in ("messages", "result", "failure")}
        if "failure" in told:
            cause = f", {episode.turn}: {told['failure']}"
            if "traceback" in answer:
                logger.warning("%s%s\n%s", episode.label, cause, answer["traceback"])
            self._failed(episode, cause)
            return
        if episode.rebuilt == len(episode.answers):
            episode.answers.append(told)
        elif told != episode.answers[episode.rebuilt]:
            self._over(episode, ": answers otherwise when it is played again with the same seed and turns")
            return
        episode.rebuilt += 1
        if episode.rebuilt < 1 + len(episode.actions):
            assert episode.process is not None, "what answered holds the episode"
            episode.process.waiting.appendleft(episode)
        else:
            self._replied(episode, told)

    def _is_open(self, episode: _Episode) -> bool:
        """Return False for an episode that was closed while its process worked on it."""
        return self._episodes.get(episode.number) is episode

    def _replied(self, episode: _Episode, told: Mapping[str, Any]) -> None:
        seconds = time.monotonic() - episode.asked
        if "messages" in told:
            self._replies.append(EpisodeReply(episode.number, messages=tuple(told["messages"]), seconds=seconds))
        else:
            self._replies.append(EpisodeReply(episode.number, result=_result(told["result"]), seconds=seconds))

    def _failed(self, episode: _Episode, cause: str) -> None:
        """Try an episode again, in another process where there is one, or report its failure. `cause` is what stands behind its label."""
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
        self._replies.append(EpisodeReply(episode.number, failure=f"{episode.label}{cause}", seconds=seconds))

    def _leave(self, episode: _Episode) -> None:
        if episode.process is not None:
            episode.process.held.pop(episode.number, None)
            episode.process.closing.append(episode)
            self._to_tell.add(episode.process)
        episode.process, episode.rebuilt = None, 0

    def _lost(self, process: "_Process", cause: str) -> None:
        """End a process: the episode it worked on has failed, the others it held are rebuilt when they are asked next.

        Where it was still closing an episode before that, that one is to blame, and the one that waited behind it is rebuilt like the others.
        """
        culprit, process.episode = process.episode, None
        held = [each for each in process.held.values() if each is not culprit]
        self._end(process)
        for episode in held:
            episode.process, episode.rebuilt = None, 0
        self._waiting.extend(process.waiting)
        process.waiting.clear()
        if culprit is not None:
            culprit.process, culprit.rebuilt = None, 0
        if process.unclosed:
            logger.warning("%s, close: %s", process.unclosed[0], cause)
        if culprit is not None and self._is_open(culprit):
            if process.unclosed:
                self._waiting.append(culprit)
            else:
                self._failed(culprit, f": {cause}")

    def _end(self, process: "_Process") -> None:
        self._processes.remove(process)
        self._to_tell.discard(process)
        for descriptor in (process.answers, process.requests):
            if descriptor >= 0 and descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        process.end()


@define(eq=False)
class _Process:
    """A process that answers one call at a time."""

    child: "subprocess.Popen[bytes]"
    requests: int
    answers: int
    held: dict[int, _Episode] = field(factory=dict)
    waiting: deque[_Episode] = field(factory=deque)
    """Episodes that it holds and that were given a turn, in that order."""
    closing: list[_Episode] = field(factory=list)
    unclosed: deque[str] = field(factory=deque)
    """Labels of the episodes that it was told to close, and has not closed yet."""
    episode: _Episode | None = None
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
        for descriptor in (answers_in, requests_out):
            os.set_blocking(descriptor, False)
        assert child.stdout is not None
        drain.take(child.stdout.fileno(), child.pid)
        child.stdout.close()
        process = cls(child, requests_out, answers_in)
        process._outgoing += setup
        return process

    def send(self, episode: _Episode, call: Mapping[str, Any]) -> None:
        """Give the process one call; `flush` writes it."""
        self.tell_closed()
        self.awaited += 1
        self.episode, self.since = episode, time.monotonic()
        self._outgoing += _line({**call, "id": self.awaited, "episode": episode.number})

    def tell_closed(self) -> None:
        """Tell the process of the episodes that are over; `flush` writes it."""
        if self.closing and not self.busy:
            self.since = time.monotonic()
        for episode in self.closing:
            self._outgoing += _line({"id": 0, "do": "close", "episode": episode.number})
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

    def stuck(self, now: float) -> bool:
        """Return True where the process is taken up by a call, so that another one may compute."""
        taken = now - self.since
        return self.ready and (taken >= _STUCK_S or (taken >= _ASLEEP_S and _sleeps(self.child.pid)))

    def received(self) -> tuple[list[bytes], bool]:
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
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}{self.place}"

    def finish(self) -> None:
        """Let the process close what it holds and end by itself."""
        with suppress(OSError):
            self.flush()
        with suppress(OSError):
            os.close(self.requests)
        self.requests = -1

    def ended(self, seconds: float) -> None:
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
        left = self._left[descriptor]
        if left <= 0:
            return
        self._left[descriptor] = left - len(data)
        for line in data[:left].decode("utf-8", "replace").splitlines():
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


def _answer(line: bytes) -> dict[str, Any] | None:
    """Return an answer; None for what is none, which an environment wrote where it does not belong."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("id"), int) else None


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
