"""Ways to start the process of a generator's replica: on this machine; `ray_replica.py` holds that on a Ray cluster."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from attrs import define

ENDING_SECONDS = 2.0
"""A process that closed its connection has so long to end, so that it can be said how."""


class ReplicaProcess(Protocol):
    """A process that was started for a replica, which serves `replica_process.serve` over a connection."""

    def connect(self) -> tuple[Connection, str]:
        """Wait for the process; return the connection to it and the device that it computes on.

        Raises EOFError where it is gone, and EngineError where there is no place for it.
        """

    def describe_end(self) -> str:
        """Say which process it was and how it ended, as a clause."""

    def end(self, seconds: float) -> None:
        """Wait so long for the process to end by itself, then end it; whoever reads from the connection then comes to its end."""


class ReplicaLauncher(Protocol):
    """Starts the processes of replicas."""

    def launch(self, number: int, output: Path) -> ReplicaProcess:
        """Start one, whose output goes to a file. Returns at once."""

    def close(self) -> None:
        """Free what starting them took."""


@define(eq=False)
class LocalLauncher:
    """Starts replicas on this machine, each on its device of `devices`.

    Each computes with its share of the cores, which are divided among the replicas and the `ranks` that work here beside them: a process takes
    all of them by default, and threads that wait for a core slow all. OMP_NUM_THREADS, where it is set, holds instead.
    """

    devices: Sequence[str]
    ranks: int = 0

    def launch(self, number: int, output: Path) -> "LocalProcess":
        ours, theirs = socket.socketpair()
        with output.open("ab") as log, theirs:
            child = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
                [sys.executable, "-m", "skyrl_engine.workers.replica_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env={"OMP_NUM_THREADS": str(self.count_threads()), **os.environ},
            )
        return LocalProcess(child, ours, self.devices[number])

    def count_threads(self) -> int:
        """Count the cores that are a replica's share, at least one."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // (len(self.devices) + self.ranks))

    def close(self) -> None:
        """Do nothing: a socket is all that a process took."""


@define(eq=False)
class LocalProcess:
    """A process on this machine, at the other end of a pair of sockets."""

    child: "subprocess.Popen[bytes]"
    _socket: socket.socket
    _device: str

    def connect(self) -> tuple[Connection, str]:
        return share_connection(self._socket), self._device

    def describe_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=ENDING_SECONDS)
        code = self.child.returncode
        if code is None:
            ending = "closed its connection"
        elif code < 0:
            ending = f"was killed by {signal.Signals(-code).name}"
        else:
            ending = f"ended with exit code {code}"
        return f"(pid {self.child.pid}) {ending}"

    def end(self, seconds: float) -> None:
        try:
            self.child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        shut_down(self._socket)


def share_connection(end: socket.socket) -> Connection:
    """Return a connection over a socket, with a descriptor of its own: who reads closes it, while `shut_down` ends the reading."""
    return Connection(os.dup(end.fileno()))


def shut_down(end: socket.socket) -> None:
    """End all connections over a socket, and close it."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
