"""Ranks for tests: processes in one process group, kept for many tasks.

On the CPU they are forked from a server that has imported what they need: a rank starts in hundredths of a second, where importing torch,
transformers and a backend would cost each of them five to eight.
"""

import contextlib
import gc
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from skyrl_engine.errors import EngineError, WorkerError
from skyrl_engine.workers.future import Future

if TYPE_CHECKING:
    from skyrl_engine.workers.spec import Device

GRACE_SECONDS = 5.0
"""After the first failure of a rank, how long to listen to the others."""

PATIENCE_SECONDS = 240.0
"""Ranks may take so long over one task: seconds are much, but the first task may import a library on a machine that is busy."""

_preloaded = [
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "skyrl_engine.workers.worker",
    "skyrl_engine.testing.backends.ranks",
]
_shared_worlds: "dict[int, World]" = {}


def preload(*modules: str) -> None:
    """Let ranks start with these modules imported, where they are installed; to be called before the first ranks of this process."""
    _preloaded.extend(module for module in modules if module not in _preloaded)


def start_shared_world(size: int) -> "World":
    """The ranks that everything in this process shares: suites, backends and tests of several folders, one after another."""
    return _shared_worlds.setdefault(size, World(size))


class World:
    """`size` ranks; `run` calls a function, importable by name, on all of them at once. A context manager; leaving it ends them.

    Ranks start with the first call, and after a failure that leaves them of no use others start with the next. On `device` "cuda" each rank
    has the CUDA device of its number, and the group is the one that a run has there. Ranks that are `measured` share no memory.
    """

    def __init__(self, size: int, *, timeout: float = PATIENCE_SECONDS, device: "Device" = "cpu", measured: bool = False) -> None:
        self._size = size
        self._timeout = timeout
        self._device = device
        self._forked = device != "cuda" and not measured and sys.platform == "linux"
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._under_way: Future[dict[int, Any]] | None = None
        self._posted: set[int] = set()
        self._arrived: dict[int, tuple[str, Any]] = {}

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # CUDA does not survive a fork after libraries have asked for it while they were imported: such ranks are spawned.
        context = multiprocessing.get_context("forkserver" if self._forked else "spawn")
        if self._forked:
            context.set_forkserver_preload(_preloaded)
        for rank in range(self._size):
            here, there = context.Pipe()
            settings = (rank, self._size, port, self._device, dict(os.environ))
            process = context.Process(target=_serve, args=(there, *settings), daemon=True)  # type: ignore[attr-defined] # typeshed gives Process to the contexts, not to their base
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Call a function on every rank and return results by rank. A rank's EngineError is raised here, any other error with its traceback.

        Raises WorkerError where a rank died or did not answer in time.
        """
        return self.begin(function, *arguments, **keywords)()

    def begin(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Callable[[], list[Any]]:
        """Let every rank begin a call, once the call before it is answered; returns what waits for the results, as `run` returns them."""
        wait_for_all = self.begin_on(range(self._size), function, *arguments, **keywords)
        return lambda: list(wait_for_all().values())

    def begin_on(
        self, ranks: Sequence[int], function: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> Callable[[], dict[int, Any]]:
        """Let some ranks begin a call as `begin` does; returns what waits for the results, by rank. Their posted calls are waited for."""
        self._settle()
        if posted := self._posted.intersection(ranks):
            self._posted -= posted
            replies = self._receive(posted)
            self._values(replies, posted)
            self._arrived |= replies
        for rank in ranks:
            with contextlib.suppress(OSError):  # of a rank that died since it last answered: it is heard of below
                self._pipes[rank].send((function, arguments, keywords))
        self._under_way = Future(lambda: self._values(self._receive(ranks), ranks))
        return self._under_way.result

    def _settle(self) -> None:
        """Wait for the call under way, and start the ranks where there are none."""
        if self._under_way is not None:
            # whoever began it is told when they ask
            with contextlib.suppress(Exception):
                self._under_way.result()
        if not self._pipes:
            self._start()

    @property
    def posted_ranks(self) -> set[int]:
        """Return the ranks with a posted call whose reply was not collected."""
        return {*self._posted, *self._arrived}

    def post(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Let one rank begin a call, once the call of all before it is answered; `begin` waits for it, and `collect` gives its reply."""
        assert rank not in self.posted_ranks, f"rank {rank} has a posted call"
        self._settle()
        with contextlib.suppress(OSError):  # of a rank that died: `collect` tells
            self._pipes[rank].send((function, arguments, {}))
        self._posted.add(rank)

    def collect(self, timeout: float) -> dict[int, Any]:
        """Return the replies to posted calls that are there, by rank: at least one, unless `timeout` seconds go by. Raises as `run` does."""
        if self._posted:
            ready = wait([self._pipes[rank] for rank in self._posted], timeout=0.0 if self._arrived else timeout)
            answered = {rank for rank in self._posted if self._pipes[rank] in ready}
            self._arrived |= self._receive(answered)
            self._posted -= answered
        arrived, self._arrived = self._arrived, {}
        if any(kind != "result" for kind, _ in arrived.values()):
            others, self._posted = self._posted, set()
            return self._values(arrived | self._receive(others, GRACE_SECONDS), {*arrived, *others})
        return {rank: value for rank, (_, value) in arrived.items()}

    def _receive(self, ranks: Collection[int], seconds: float | None = None) -> dict[int, tuple[str, Any]]:
        """Wait for the replies of these ranks, and after a failure a little longer; a rank that stays silent has none."""
        replies: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + (self._timeout if seconds is None else seconds)
        while len(replies) < len(ranks):
            waiting = {self._pipes[rank]: rank for rank in ranks if rank not in replies}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for pipe, rank in waiting.items():
                if pipe in ready:
                    replies[rank] = _receive(pipe)
            if any(kind != "result" for kind, _ in replies.values()):  # its peers may wait for it in a collective
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready:
                break
        return replies

    def _values(self, replies: Mapping[int, tuple[str, Any]], asked: Collection[int]) -> dict[int, Any]:
        """Return the values of replies; raise what explains that there are none, and end ranks that are of no use any more."""
        silent = [rank for rank in sorted(asked) if rank not in replies]
        if silent or any(kind == "death" for kind, _ in replies.values()):
            self._end(patience=0.0)
        for _, (kind, value) in sorted(replies.items()):
            if kind == "engine error":
                raise value
        for rank, (kind, value) in sorted(replies.items()):
            if kind == "death":
                raise WorkerError(f"rank {rank} died", rank=rank, remedy="Look for what the process wrote before")
            assert kind == "result", value
        if silent:
            raise WorkerError(
                f"rank {silent[0]} did not answer within {self._timeout:.0f} seconds",
                rank=silent[0],
                remedy="Let every rank take part in the same collectives in the same order",
            )
        return {rank: value for rank, (_, value) in sorted(replies.items())}

    @property
    def running(self) -> bool:
        """Say whether there are ranks: not before the first call, nor after a failure that left them of no use."""
        return bool(self._pipes)

    def close(self) -> None:
        """End the ranks, whatever state they are in. A later call starts others."""
        self._under_way = None
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # of a rank that died
                pipe.send(None)
        self._end(patience=GRACE_SECONDS)

    def _end(self, *, patience: float) -> None:
        for process in self._processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        self._posted, self._arrived = set(), {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except (EOFError, OSError):
        return "death", None
    return kind, value


@contextmanager
def alone() -> Iterator[None]:
    """Open a gloo group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined] # public in torch's documentation, not in its exports
    try:
        yield
    finally:
        dist.destroy_process_group()


def _serve(pipe: Connection, rank: int, size: int, port: int, device: "Device", environment: Mapping[str, str]) -> None:
    """Answer tasks until there is none. `environment` is the asking process'; the server's is of the time when that started."""
    os.environ.clear()
    os.environ.update(environment)
    import torch

    from skyrl_engine.workers.process_group import Rendezvous, join, leave, pick_device

    torch.set_num_threads(1)
    join(rank, size, pick_device(device, rank), Rendezvous("127.0.0.1", port))
    while (task := pipe.recv()) is not None:
        function, arguments, keywords = task
        try:
            pipe.send(("result", function(*arguments, **keywords)))
        except EngineError as error:
            pipe.send(("engine error", error))
        except Exception:  # noqa: BLE001 - whatever a rank meets belongs to the test that asked for it
            pipe.send(("failure", traceback.format_exc()))
        # Modules that the first task imported live as long as the rank. DeepSpeed collects garbage at every start, which then is quick.
        if not gc.get_freeze_count():
            gc.freeze()
    leave()
