"""The servers of a generator: which are up, what weights they have, and how lost ones come back.

A server is lost when it dies, hangs, or says what no vLLM server says. It comes back as soon as it was checked, given the present weights and
proven; one that this run started is ended and started again first, where it does not come back as it is.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx

from skyrl_engine import EngineError, ModelError, RolloutError
from skyrl_engine.contracts import GeneratorStart, WeightForm, WeightSource
from skyrl_engine_vllm.checks import ServerFacts, check_server
from skyrl_engine_vllm.checksums import checksum_of
from skyrl_engine_vllm.client import ServerClient
from skyrl_engine_vllm.delivery import Delivery, Proof
from skyrl_engine_vllm.errors import ServerFault
from skyrl_engine_vllm.options import VllmOptions
from skyrl_engine_vllm.process import ServerProcess
from skyrl_engine_vllm.twin import Twin

T = TypeVar("T")

WATCH_SECONDS = 2.0
"""Seconds between two looks at every server."""

MISSED_LOOKS = 3
"""Looks that a server may leave unanswered in a row, of `PROBE_SECONDS` each."""

SOFT_FAULTS = 2
"""Faults without a right answer between them after which a server that this run started is started again at once."""

log = logging.getLogger("skyrl_engine_vllm")


class VllmServer:
    """One server. The event loop and threads share it: numbers and flags are changed under the lock of `Servers`, `load` in the loop alone."""

    facts: ServerFacts
    http: httpx.AsyncClient

    def __init__(self, url: str, options: VllmOptions, key: str | None, process: ServerProcess | None) -> None:
        self.url, self.process = url, process
        # a checkpoint's worth of tensors is on its way during one call
        self.client = ServerClient(url, key, seconds=options.update_seconds)
        self.delivery = Delivery(self.client, options)
        self.is_up = False
        self.is_unproven = False
        self.is_returning = False
        self.faults = 0
        self.restarts = 0
        self.given_up: str | None = None
        self.load = 0
        self.posts: set[asyncio.Future[httpx.Response]] = set()

    def describe(self, fault: ServerFault) -> str:
        """Say what went wrong with it, with its own last words where it died."""
        died = self.process is not None and not self.process.is_running()
        words = f"; it is dead: {self.process.last_words()}" if died and self.process is not None else ""
        return f"the vLLM server at {self.url}: {fault.cause}{words}"


class Servers:
    """All servers of a generator, and the weights that are published to them."""

    def __init__(self, options: VllmOptions, key: str | None, start: GeneratorStart, form: WeightForm, folder: Path) -> None:
        self._options, self._start = options, start
        self._lock = threading.RLock()
        self._delivering = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._run = secrets.token_hex(4)
        self._threads: list[threading.Thread] = []
        self.twin = Twin(start, form)
        self.twin.take(start.weights)
        self.published: dict[str, int] = {}
        self._publish(start.version)
        if options.urls:
            self.all = [VllmServer(url.rstrip("/"), options, key, None) for url in options.urls]
        else:
            processes = [ServerProcess(number, options, start, form, folder, key) for number in range(options.servers)]
            self.all = [VllmServer(process.url, options, key, process) for process in processes]
        self.on_lost: Callable[[VllmServer], None] = lambda _server: None

    # --- start and end ---------------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start all servers that are to be started, check all, and give them the weights. Raises EngineError for one that is not fit."""
        try:
            for server in self.all:
                if server.process is not None:
                    server.process.launch()
            for server, error in zip(self.all, in_parallel(self._try_to_open, self.all), strict=True):
                if isinstance(error, EngineError):
                    raise error
                if error is not None:
                    died = server.process is not None and not server.process.is_running()
                    lines = server.process.last_lines() if died and server.process is not None else ()
                    raise ModelError(server.describe(error), remedy="See its log, and try its command by hand", details=list(lines))
        except BaseException:
            self.close()
            raise
        watcher = threading.Thread(target=self._watch, name="vllm-watch", daemon=True)
        self._threads.append(watcher)
        watcher.start()

    def _try_to_open(self, server: VllmServer) -> "ServerFault | EngineError | None":
        try:
            if server.process is not None:
                server.process.wait_until_healthy(server.client)
            self._admit(server)
        except (ServerFault, EngineError) as error:
            return error
        return None

    def close(self) -> None:
        """End servers that this run started."""
        self._closing.set()
        in_parallel(lambda server: None if server.process is None else server.process.end(), self.all)
        for thread in self._threads:
            thread.join(timeout=5.0)
        for server in self.all:
            server.client.close()

    # --- weights ---------------------------------------------------------------------------------------------------------------------

    def update(self, weights: WeightSource, version: int) -> None:
        """Give new weights to all servers that are up; lost ones get them when they are back.

        Raises ModelError for weights that do not fit, before any changes, RolloutError where no server is left.
        """
        with self._delivering:
            self.twin.take(weights)
            self._publish(version)
            up = [server for server in self.all if server.is_up]
            for server, fault in zip(up, in_parallel(self._try_to_deliver, up), strict=True):
                if fault is not None:
                    self.lose(server, fault)
        self.wait_for_one()

    def sleep(self) -> None:
        """Let all servers free their devices until the next update. Raises UnsupportedError for one that cannot."""
        with self._delivering:
            in_parallel(lambda server: server.delivery.sleep(), [server for server in self.all if server.is_up])

    def wait_for_one(self) -> None:
        """Wait until a server is up. Raises RolloutError where all are given up."""
        with self._changed:
            while not any(server.is_up for server in self.all):
                self.require_one()
                self._changed.wait(1.0)

    def require_one(self) -> None:
        """Raise RolloutError where all servers are given up."""
        if all(server.given_up for server in self.all):
            causes = [str(server.given_up) for server in self.all]
            raise RolloutError(
                f"no vLLM server is left: {causes[0]}", remedy="Resume the run once servers are well", details=causes[1:]
            )

    def _publish(self, version: int) -> None:
        """Name the present weights by a tag that no other run has, and compute what servers must say of them."""
        self._tag = f"{self._run}:{version}"
        self.published[self._tag] = version
        self._checksums = {name: checksum_of(tensor) for name, tensor in self.twin.tensors()} if self.twin.form == "tensors" else {}
        self._proof: Proof | None = None

    def _try_to_deliver(self, server: VllmServer) -> ServerFault | None:
        try:
            self._deliver(server)
        except ServerFault as fault:
            return fault
        return None

    def _deliver(self, server: VllmServer) -> None:
        """Give a server the present weights, and prove it; `is_unproven` holds back what it samples meanwhile."""
        server.is_unproven = True
        try:
            server.delivery.deliver(self.twin, self._tag, self._checksums)
            with self._lock:
                if self._proof is None:
                    self._proof = Proof(self.twin, server.facts.longest)
            self._proof.require(server.client, server.delivery.model, server.facts.dtype, self._tag)
        except BaseException:
            server.is_up = False
            raise
        finally:
            server.is_unproven = False

    def _admit(self, server: VllmServer) -> None:
        """Check a server, give it the present weights, and let it serve."""
        server.facts = check_server(server.client, self._options, self._start, self.twin)
        with self._delivering:
            self._deliver(server)
            with self._changed:
                server.is_up, server.faults = True, 0
                self._changed.notify_all()

    # --- servers that are lost -------------------------------------------------------------------------------------------------------

    def lose(self, server: VllmServer, fault: ServerFault) -> None:
        """Let nothing go to a server any more, and bring it back in a thread. A second call while it is away does nothing."""
        with self._lock:
            if self._closing.is_set() or server.is_returning or server.given_up:
                return
            server.is_up, server.is_returning = False, True
            server.faults += 1
            log.warning("%s; it is brought back, and its requests are sent again", server.describe(fault))
            thread = threading.Thread(target=self._bring_back, args=(server, fault), name="vllm-return", daemon=True)
            self._threads.append(thread)
            thread.start()
        self.on_lost(server)

    def _bring_back(self, server: VllmServer, fault: ServerFault) -> None:
        cause = server.describe(fault)
        is_first = True
        try:
            while not self._closing.is_set():
                try:
                    self._return_once(server, as_it_is=is_first and server.faults < SOFT_FAULTS)
                except ServerFault as again:
                    cause = server.describe(again)
                except EngineError as error:
                    cause = error.cause
                else:
                    log.warning("the vLLM server at %s is back with the present weights", server.url)
                    return
                limit = self._options.restarts
                is_first = False
                if server.process is not None and server.restarts >= limit:
                    break
                if server.process is None:
                    # somebody else may start it again
                    if server.faults > limit:
                        break
                    server.faults += 1
                    self._closing.wait(WATCH_SECONDS)
            with self._changed:
                if not self._closing.is_set():
                    server.given_up = cause
                    log.error("%s; it is given up", cause)
                self._changed.notify_all()
        finally:
            server.is_returning = False
            self.on_lost(server)

    def _return_once(self, server: VllmServer, *, as_it_is: bool) -> None:
        process = server.process
        if process is None:
            if not server.client.is_healthy():
                raise ServerFault("it is not well")
            server.delivery.forget_connection()
        elif not (as_it_is and process.is_running() and server.client.is_healthy()):
            server.restarts += 1
            process.end()
            process.launch()
            if self._closing.is_set():
                process.end()
                raise ServerFault("the run has ended meanwhile")
            server.delivery.forget_connection()
            process.wait_until_healthy(server.client)
        self._admit(server)

    def _watch(self) -> None:
        missed: dict[VllmServer, int] = {}
        while not self._closing.wait(WATCH_SECONDS):
            for server in self.all:
                if not server.is_up:
                    continue
                if server.process is not None and not server.process.is_running():
                    self.lose(server, ServerFault("it ended"))
                    continue
                missed[server] = 0 if server.client.is_healthy() else missed.get(server, 0) + 1
                if missed[server] >= MISSED_LOOKS:
                    server.faults = SOFT_FAULTS
                    self.lose(server, ServerFault("it does not answer /health"))


def in_parallel(work: Callable[[VllmServer], T], servers: Sequence[VllmServer]) -> list[T]:
    """Do something for each server, all at once, and return the results in their order."""
    if not servers:
        return []
    with ThreadPoolExecutor(len(servers), thread_name_prefix="vllm-server") as pool:
        return list(pool.map(work, servers))
