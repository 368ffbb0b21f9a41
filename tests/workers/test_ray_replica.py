"""Replicas as actors of Ray: who may connect, and what a cluster must have. tests/training/rl/test_replicas_on_ray.py starts them."""

import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import answer_challenge, deliver_challenge
from pathlib import Path

import pytest

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.workers import ray_replica
from skyrl_engine.workers.ray_replica import ReplicaActor, has_key, notice_loss, refuse_without_room
from skyrl_engine.workers.replica_launch import share_connection, shut_down

KEY = secrets.token_bytes(32)


def come_with(key: bytes) -> Callable[[socket.socket], None]:
    def come(end: socket.socket) -> None:
        with share_connection(end) as connection:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)

    return come


def say_nothing(end: socket.socket) -> None:
    end.recv(1)


def leave(end: socket.socket) -> None:
    end.close()


def say_much(end: socket.socket) -> None:
    end.sendall(b"\x7f" * 100)


@pytest.mark.parametrize(
    ("come", "is_let_in"),
    [(come_with(KEY), True), (come_with(KEY[::-1]), False), (say_nothing, False), (leave, False), (say_much, False)],
    ids=["key", "other key", "silent", "leaves", "talks"],
)
def test_a_peer_without_the_key_is_turned_away(monkeypatch: pytest.MonkeyPatch, come: Callable[..., None], is_let_in: bool) -> None:
    """Nothing that it says is unpickled before; one that says nothing keeps the controller for a while only."""
    monkeypatch.setattr(ray_replica, "PROOF_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        failures: list[Exception] = []

        def run() -> None:
            try:
                come(theirs)
            except Exception as error:  # noqa: BLE001 - it is looked at below
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert has_key(ours, KEY) is is_let_in
            if is_let_in:
                thread.join()
                notice_loss(ours)
                with share_connection(ours) as one, share_connection(theirs) as other:
                    other.send("first")
                    assert one.recv() == "first"
                    shut_down(ours)
                    with pytest.raises(EOFError):
                        one.recv()
        finally:
            shut_down(ours)
            thread.join()
        assert bool(failures) is (come.__name__ == "come" and not is_let_in)


@pytest.mark.parametrize(
    ("nodes", "share", "replicas", "told"),
    [
        ([{"CPU": 2.0}, {"CPU": 2.0}], {"CPU": 1.0}, 3, None),
        (
            [{"CPU": 2.0}, {"CPU": 2.0}],
            {"CPU": 1.0},
            4,
            "needs 4 CPU beside the ranks' 1 CPU, the Ray cluster has 2 nodes of 2 CPU",
        ),
        ([{"CPU": 3.0}, {"CPU": 3.0}], {"CPU": 2.0}, 2, None),
        ([{"CPU": 2.0}, {"CPU": 1.0}], {"CPU": 1.5}, 2, "with 1.5 CPU each needs 3 CPU .* has 1 node of 1 CPU, 1 node of 2 CPU"),
        ([{"CPU": 8.0, "GPU": 2.0}], {"CPU": 1.0, "GPU": 0.5}, 4, "needs 4 CPU and 2 GPU beside the ranks' 1 CPU and 1 GPU"),
        ([{"CPU": 8.0, "GPU": 2.0}], {"CPU": 1.0, "GPU": 0.5}, 2, None),
        ([{"CPU": 8.0}], {"CPU": 1.0, "GPU": 1.0}, 1, "the Ray cluster has 1 node of 8 CPU and 0 GPU"),
        ([{"CPU": 1.0}], {"CPU": 0.0}, 9, None),
    ],
)
def test_a_cluster_that_could_never_hold_the_replicas_is_refused(
    nodes: list[Mapping[str, float]], share: Mapping[str, float], replicas: int, told: str | None
) -> None:
    ranks = {"CPU": 1.0, "GPU": 1.0}
    if told is None:
        refuse_without_room(nodes, share, replicas, ranks)
    else:
        with pytest.raises(UnsupportedError, match=told):
            refuse_without_room(nodes, share, replicas, ranks)


def test_an_actor_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    """Another file of this name is not enough: folders of one name are on every node."""
    mark = tmp_path / "replica-0.mark"
    assert ReplicaActor().begin(str(tmp_path / "log"), str(mark), "token") is None
    mark.write_text("of another run")
    assert ReplicaActor().begin(str(tmp_path / "log"), str(mark), "token") is None
    assert not (tmp_path / "log").exists()
