"""Generators in processes of their own, each a replica of the model: the controller's side."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Final

from attrs import define, field, frozen

from skyrl_engine.cleanup import close_after
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.kinds.generator import POLICY, Completion, GenerationRequest, WeightSource
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import RolloutError
from skyrl_engine.scratch import ScratchFolder
from skyrl_engine.workers.generation import StoredWeights
from skyrl_engine.workers.generator_hosts import WeightFolders
from skyrl_engine.workers.replica_launch import ReplicaLauncher, ReplicaProcess
from skyrl_engine.workers.replica_messages import Call, CallEnd, ReplicaStart, Sampled
from skyrl_engine.workers.sampler_facts import SamplerFacts
from skyrl_engine.workers.session_places import SessionPlaces

RESTARTS: Final = 3
"""Deaths in a row, without a finished request in between, after which a replica is started again."""

END_SECONDS: Final = 10.0
WAIT_SECONDS: Final = 1.0
LAST_LINES: Final = 20

WEIGHT_CALLS: Final = frozenset({"start", "update", "load", "release", "sleep"})
"""Calls that move weights, and may take as long as these need."""

logger = logging.getLogger(__name__)


@frozen
class SilenceLimits:
    """The longest times, in seconds, for which a replica may send nothing before it counts as hanging."""

    sampling: float = math.inf
    weights: float = math.inf
    """While it starts, or a call moves its weights."""


@define(eq=False)
class Replica:
    """One process of a generator, and what it owes. A thread sends it its calls, so that one that does not read holds up nobody."""

    number: int
    process: ReplicaProcess
    output: Path
    _make_start: Callable[[str], ReplicaStart]
    """Returns the first message by the device of the process."""
    _inbox: "SimpleQueue[tuple[Replica, Any]]"
    owed: "deque[str]" = field(factory=lambda: deque(["start"]), init=False)
    """Calls that it has not answered, in the order in which it will: its start, and every call."""
    heard: float = field(factory=monotonic, init=False)
    """The moment of its last message, or of a later one from which its silence counts, by `monotonic`."""
    _outbox: "SimpleQueue[Call | None]" = field(factory=SimpleQueue, init=False)
    """Calls that are not sent; None: there will be no more."""
    _thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        """Start a thread that puts what the process sends into the inbox, and None when it is gone."""
        self._thread = threading.Thread(target=self._receive, name=f"generator replica {self.number}", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        """Read all that the process sends: it must never wait for the controller to read while the controller waits for it."""
        try:
            connection = self._connect()
        except (EOFError, ConnectionError):
            self._inbox.put((self, None))
            return
        except Exception as error:  # noqa: BLE001 - a cause must not look like silence
            self._inbox.put((self, CallEnd.of_failure(error)))
            return
        sender = threading.Thread(target=self._send_calls, args=(connection,), name=f"{self._thread.name}, calls", daemon=True)
        with connection:
            sender.start()
            while True:
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    message = None
                except Exception as error:  # noqa: BLE001 - as above
                    message = CallEnd.of_failure(error)
                self.heard = monotonic()
                self._inbox.put((self, message))
                if message is None:
                    break
            self._outbox.put(None)
            sender.join()

    def _connect(self) -> Connection:
        connection, device = self.process.connect()
        connection.send(self._make_start(device))
        return connection

    def _send_calls(self, connection: Connection) -> None:
        """Send calls in turn. A process that is gone is told by its reader, a call that cannot be sent as what the process met."""
        with suppress(OSError):
            while (call := self._outbox.get()) is not None:
                try:
                    connection.send(call)
                except OSError:
                    raise
                except Exception as error:  # noqa: BLE001 - such as a request that cannot be pickled: nobody else would tell
                    self._inbox.put((self, CallEnd.of_failure(error)))

    def send(self, call: Call) -> None:
        """Send a call as soon as the process reads it. Returns at once."""
        self.owed.append(call.method)
        if call.method in WEIGHT_CALLS:
            self.heard = monotonic()
        self._outbox.put(call)

    def describe_hang(self, *, samples: bool, limits: SilenceLimits) -> str | None:
        """Say how it hangs, as a clause; None: it does not, or owes nothing."""
        silence = monotonic() - self.heard
        if moved := [method for method in self.owed if method in WEIGHT_CALLS]:
            if silence > limits.weights:
                return f"replica {self.number} hangs in its call '{moved[0]}': it sent nothing for {limits.weights:g} s"
        elif samples and silence > limits.sampling:
            return f"replica {self.number} hangs while it samples: it sent nothing for {limits.sampling:g} s"
        return None

    def describe_end(self) -> str:
        """Say how the process ended."""
        return f"replica {self.number} {self.process.describe_end()}"

    def read_last_lines(self) -> tuple[str, ...]:
        """Return what the process printed last."""
        with suppress(OSError):
            return tuple(self.output.read_text(errors="replace").splitlines()[-LAST_LINES:])
        return ()

    def end(self, seconds: float = 0.0) -> None:
        """Wait so long for the process to end by itself, then end it."""
        self.process.end(seconds)
        self._thread.join(WAIT_SECONDS)


@define(eq=False)
class ReplicaHost:
    """Replicas of a generator in processes of their own. One that dies is started again with the weights that it had, and given its requests
    again, under the same seeds.
    """

    label: str
    folders: WeightFolders
    _launcher: ReplicaLauncher
    _make_start: Callable[[str, WeightSource, int], ReplicaStart]
    """Returns the start of a replica on a device, with weights and their version."""
    _logs: Path
    _limits: SilenceLimits = SilenceLimits()
    _scratch: ScratchFolder | None = None
    """The folder of the logs, where the run has none for them. It is kept where an error names one of them."""
    _places: SessionPlaces = field(init=False)
    _replicas: list[Replica] = field(factory=list, init=False)
    _requests: list[dict[int, GenerationRequest]] = field(factory=list, init=False)
    """By replica, the requests that it has not answered."""
    _deaths: list[int] = field(factory=list, init=False)
    """By replica, how often it died since it last answered a request."""
    _weights: dict[str, tuple[WeightSource, int]] = field(factory=dict, init=False)
    """By target, what the replicas hold."""
    _asleep: bool = field(default=False, init=False)
    _inbox: "SimpleQueue[tuple[Replica, Any]]" = field(factory=SimpleQueue, init=False)
    _ready: list[Completion] = field(factory=list, init=False)

    concurrent, on_ranks = True, False

    @classmethod
    def start(
        cls,
        lock: Mapping[str, Any],
        context: FactoryContext,
        facts: SamplerFacts,
        folders: WeightFolders,
        *,
        label: str,
        version: int,
        replicas: int,
        launcher: ReplicaLauncher,
        limits: SilenceLimits = SilenceLimits(),
    ) -> "ReplicaHost":
        """Start replicas, with the weights that were written under `version`. Raises what the start of a generator raises.

        One that sends nothing for longer than a limit is ended, and started again like one that died.
        """

        def make_start(device: str, weights: WeightSource, version: int) -> ReplicaStart:
            return ReplicaStart(lock, context, facts, folders.model, device, weights, version)

        scratch, logs = None, facts.folder
        if logs is None:
            scratch = ScratchFolder("generator")
            logs = scratch.path
        logs = logs.absolute()
        logs.mkdir(parents=True, exist_ok=True)
        host = cls(label, folders, launcher, make_start, logs, limits, scratch)
        try:
            host._weights[POLICY] = folders.get(version), version
            host._places = SessionPlaces(replicas)
            for number in range(replicas):
                host._requests.append({})
                host._deaths.append(0)
                host._replicas.append(host._launch(number))
            host._await_answers()
        except BaseException as error:
            close_after(error, host.close)
            raise
        return host

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand requests over. One that no generator could serve is told by `poll`."""
        for replica, share in zip(list(self._replicas), self._places.share(requests), strict=True):
            if share:
                if not (self._requests[replica.number] or replica.owed):
                    replica.heard = monotonic()
                self._requests[replica.number].update((request.request_id, request) for request in share)
                replica.send(Call("submit", (share,)))

    def poll(self, timeout: float) -> list[Completion]:
        until = monotonic() + timeout
        self._take(0.0)
        while not self._ready and (waiting := until - monotonic()) > 0:
            self._take(waiting)
        ready, self._ready = self._ready, []
        return ready

    def abort(self, request_ids: Sequence[int] | None) -> None:
        self._call("abort", request_ids)

    def end_sessions(self, sessions: Sequence[int]) -> None:
        self._call("end_sessions", sessions)
        self._places.end(sessions)

    def write(self, version: int, target: str) -> None:
        self.folders.write(version, target)

    def update(self, version: int, target: str) -> None:
        self._give(self.folders.get(version, target), version, target)
        self.folders.remove_before(version, target)

    def load(self, model: ModelConfig, target: str) -> None:
        self._give(StoredWeights(model), 0, target)

    def release(self, target: str) -> None:
        self._call("release", target)
        self._await_answers()
        self._weights.pop(target, None)
        self.folders.release(target)

    def sleep(self) -> None:
        self._asleep = True
        self._call("sleep")
        self._await_answers()

    def wake(self, besides: str | None = None) -> None:
        self._asleep = False
        for target, (weights, version) in self._weights.items():
            if target != besides:
                self._call("update", weights, version, target)
        self._await_answers()

    def close(self) -> None:
        for replica in self._replicas:
            replica.send(Call("close"))
        for replica in self._replicas:
            replica.end(END_SECONDS)
        self._launcher.close()
        self.folders.close()
        if self._scratch is not None:
            self._scratch.close()

    def _name_log(self, replica: Replica) -> str:
        """Return the path of a replica's log for a person, for whom it stays."""
        if self._scratch is not None:
            self._scratch.keep()
        return str(replica.output)

    def _give(self, weights: WeightSource, version: int, target: str) -> None:
        self._weights[target] = weights, version
        self._call("update", weights, version, target)
        self._await_answers()
        if target == POLICY:
            self._places.forget_idle()

    def _call(self, method: str, *arguments: Any) -> None:
        for replica in list(self._replicas):
            replica.send(Call(method, arguments))

    def _await_answers(self) -> None:
        """Wait until all replicas have answered all calls. Raises what one of them met."""
        while any(replica.owed for replica in self._replicas):
            self._take(WAIT_SECONDS)

    def _take(self, timeout: float) -> None:
        """Take one message, if one comes in time, and all that came with it; replace replicas that hang."""
        try:
            self._handle(*(self._inbox.get(timeout=min(timeout, WAIT_SECONDS)) if timeout > 0 else self._inbox.get_nowait()))
            while True:
                self._handle(*self._inbox.get_nowait())
        except Empty:
            pass
        for replica in list(self._replicas):
            if hang := replica.describe_hang(samples=bool(self._requests[replica.number]), limits=self._limits):
                self._replace(replica, hang)

    def _handle(self, replica: Replica, message: Any) -> None:
        if self._replicas[replica.number : replica.number + 1] != [replica]:
            return  # a process that was replaced
        if message is None:
            self._replace(replica, replica.describe_end())
        elif isinstance(message, Sampled):
            open_requests = self._requests[replica.number]
            # those that are unknown are the sampler's to refuse
            for completion in message.completions:
                open_requests.pop(completion.request_id, None)
            self._places.finish(completion.request_id for completion in message.completions)
            if message.completions:
                self._deaths[replica.number] = 0
            self._ready += message.completions
        else:
            # one that ends for what it met while it sampled, or could not be connected, answers nothing
            if replica.owed:
                replica.owed.popleft()
            self._raise_failure(replica, message)

    def _raise_failure(self, replica: Replica, answer: CallEnd) -> None:
        if answer.error is not None:
            answer.error.details = (*answer.error.details, f"replica {replica.number} of {len(self._requests)} met this")
            raise answer.error
        if answer.cause is not None:
            raise RolloutError(
                f"{self.label} failed in replica {replica.number}: {answer.cause}",
                remedy=f"See its trace above, and {self._name_log(replica)}",
                details=answer.trace.splitlines(),
            )

    def _launch(self, number: int) -> Replica:
        weights, version = self._weights[POLICY]
        output = self._logs / f"replica-{number}.log"
        process = self._launcher.launch(number, output)
        return Replica(number, process, output, lambda device: self._make_start(device, weights, version), self._inbox)

    def _replace(self, replica: Replica, ending: str) -> None:
        """Start a replica again that is gone, or hangs. Raises RolloutError where this happens again and again."""
        number = replica.number
        self._deaths[number] += 1
        replica.end()
        lines = replica.read_last_lines()
        if self._deaths[number] > RESTARTS:
            raise RolloutError(
                f"{self.label}: {ending}, {self._deaths[number]} times in a row without finishing a request",
                remedy=f"See {self._name_log(replica)}; where the system ends it for its memory, lower generator.replicas or what each holds",
                details=lines,
            )
        logger.warning("%s: %s; it is started again, with its %d requests", self.label, ending, len(self._requests[number]))
        new = self._launch(number)
        self._replicas[number] = new
        for target, (weights, version) in self._weights.items():
            if target != POLICY:
                new.send(Call("update", (weights, version, target)))
        if self._asleep:
            new.send(Call("sleep"))
        if self._requests[number]:
            new.send(Call("submit", (list(self._requests[number].values()),)))
