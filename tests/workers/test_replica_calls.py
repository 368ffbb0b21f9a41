"""Calls on their way to a replica: one that cannot be sent is told, and the next one is sent."""

import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from skyrl_engine.workers.replica_launch import share_connection, shut_down
from skyrl_engine.workers.replica_messages import Call
from skyrl_engine.workers.replicas import Replica


class OtherEnd:
    """A process of a replica that only takes what it is sent."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self.received = share_connection(theirs)
        theirs.close()

    def connect(self) -> tuple[Connection, str]:
        return share_connection(self._ours), "cpu"

    def describe_end(self) -> str:
        return "ended"

    def end(self, seconds: float) -> None:
        shut_down(self._ours)


@pytest.fixture
def process() -> Iterator[OtherEnd]:
    end = OtherEnd()
    yield end
    end.received.close()


def make_replica(process: OtherEnd, inbox: "SimpleQueue[tuple[Replica, Any]]", folder: Path) -> Replica:
    return Replica(0, process, folder / "log", lambda device: f"a start on {device}", inbox)  # type: ignore[arg-type, return-value]


def test_a_call_that_cannot_be_sent_is_told(process: OtherEnd, tmp_path: Path) -> None:
    inbox: SimpleQueue[tuple[Replica, Any]] = SimpleQueue()
    replica = make_replica(process, inbox, tmp_path)
    assert process.received.recv() == "a start on cpu"
    replica.send(Call("submit", (lambda: None,)))
    of, answer = inbox.get(timeout=10.0)
    assert of is replica
    assert "local object" in answer.cause
    replica.send(Call("abort", (None,)))
    assert process.received.recv() == Call("abort", (None,))
    replica.end()


def test_a_process_that_does_not_read_holds_up_nobody(process: OtherEnd, tmp_path: Path) -> None:
    replica = make_replica(process, SimpleQueue(), tmp_path)
    for _ in range(3):
        replica.send(Call("submit", (b"x" * 5_000_000,)))
    assert process.received.recv() == "a start on cpu"
    assert [len(process.received.recv().arguments[0]) for _ in range(3)] == [5_000_000] * 3
    replica.end()
