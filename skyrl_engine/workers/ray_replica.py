"""Replicas of a generator as actors of Ray, on any node of the cluster. Ray places them; calls and completions go over TCP.

The controller listens on its node's address, once per actor, for a peer that proves that it has a key, which travels in the actor's arguments
and is written nowhere. Over the connection runs the loop of a replica on this machine (`replica_process.py`). It closes when the actor ends,
and after LOST_SECONDS when its node is lost; the actor ends when the controller is gone.
"""

import logging
import math
import os
import secrets
import socket
import struct
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from skyrl_engine.errors import UnsupportedError, WorkerError
from skyrl_engine.workers.ray_actor import Place, find_place
from skyrl_engine.workers.ray_cluster import describe_amounts, describe_death, import_ray, multiply, wait_for_room
from skyrl_engine.workers.ray_watch import GCS_SECONDS, RayWatch
from skyrl_engine.workers.replica_launch import share_connection, shut_down

WAIT_SECONDS: Final = 1.0
"""A wait for an actor looks so often whether it is still wanted."""

RAY_SECONDS: Final = 0.2
"""The end of Ray itself is known so long after that of its actors."""

NEWS_SECONDS: Final = 2.0
"""Ray has so long to say how an actor ended whose connection closed."""

PROOF_SECONDS: Final = 10.0
"""A peer has so long to prove that it has the key."""

LOST_SECONDS: Final = 30
"""A peer whose machine does not answer for so long is gone."""

logger = logging.getLogger(__name__)


class ReplicaActor:
    """One replica. Nothing of torch is imported before its start comes."""

    def begin(self, output: str, mark: str, token: str) -> tuple[Place, str] | None:
        """Write all output to a file; return the actor's place and its device. None where the file `mark` with this token is not seen here."""
        try:
            if Path(mark).read_text(encoding="utf-8") != token:
                return None
        except OSError:
            return None
        from skyrl_engine.workers.rank_output import redirect_output

        redirect_output(output)
        place = find_place(output)
        return place, f"cuda:{place.device_index}" if place.gpus else "cpu"

    def serve(self, address: tuple[str, int], key: bytes) -> None:
        """Serve the controller that listens at an address until it says `close` or is gone."""
        from skyrl_engine.workers.replica_process import serve_until_gone

        try:
            with socket.create_connection(address, timeout=PROOF_SECONDS) as end:
                end.settimeout(None)
                connection = share_connection(end)
                answer_challenge(connection, key)
                deliver_challenge(connection, key)
                notice_loss(end)
            serve_until_gone(connection)
        except Exception:  # noqa: BLE001 - it is printed
            # as a process of its own would end: the controller sees the connection close, and what was printed
            traceback.print_exc()
            os._exit(1)


@define(eq=False)
class RayLauncher:
    """Starts actors that hold `share` of the cluster each. The ranks are on it already, so that this process has joined it."""

    share: Mapping[str, float]
    ray: Any
    watch: RayWatch

    @classmethod
    def open(cls, share: Mapping[str, float], replicas: int, *, ranks: Mapping[str, float]) -> "RayLauncher":
        """Refuse a cluster that cannot hold the replicas beside what the `ranks` hold. Raises UnsupportedError."""
        ray = import_ray()
        refuse_without_room([node["Resources"] for node in ray.nodes() if node["Alive"]], share, replicas, ranks)
        return cls(share, ray, RayWatch(ray, gcs_seconds=GCS_SECONDS))

    def launch(self, number: int, output: Path) -> "RayProcess":
        self.refuse_lost_ray()
        actor = self.ray.remote(ReplicaActor).options(
            num_cpus=self.share["CPU"], num_gpus=self.share.get("GPU", 0), max_restarts=0, scheduling_strategy="SPREAD"
        )
        return RayProcess(self, number, output, actor.remote())

    def refuse_lost_ray(self) -> None:
        """Raise WorkerError where Ray itself has ended: it would end this process at its next use."""
        if (lost := self.watch.find_lost_process()) is not None:
            raise WorkerError(
                f"Ray's {lost} ended, and the generator's replicas with it",
                rank=None,
                remedy="Look for lack of memory or a signal there, then resume from the latest checkpoint",
            )

    def close(self) -> None:
        self.watch.close()


@define(eq=False)
class RayProcess:
    """The process of an actor, at the other end of a TCP connection."""

    _cluster: RayLauncher
    _number: int
    _output: Path
    _actor: Any
    _place: Place | None = field(default=None, init=False)
    _call: Any = field(default=None, init=False)
    """Ray's promise of the end of the actor's last call."""
    _end: socket.socket | None = field(default=None, init=False)
    _ending: threading.Event = field(factory=threading.Event, init=False)

    def connect(self) -> tuple[Connection, str]:
        self._place, device = self._await_place()
        host: str = self._cluster.ray.util.get_node_ip_address()
        key = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as server:
            self._call = self._actor.serve.remote(server.getsockname()[:2], key)
            self._end = self._accept(server, key)
        logger.info("replica %d: on %s", self._number, self._place)
        return share_connection(self._end), device

    def describe_end(self) -> str:
        where = "" if self._place is None else f"(on {self._place}) "
        if (lost := self._cluster.watch.find_lost_process(RAY_SECONDS)) is not None:
            return f"{where}ended with Ray's {lost}"
        ray = self._cluster.ray
        try:
            ray.get(self._call, timeout=NEWS_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return f"{where}closed its connection"
        except ray.exceptions.RayError as error:
            return f"{where}died: {describe_death(error)}"
        return f"{where}ended"

    def end(self, seconds: float) -> None:
        self._ending.set()
        ray = self._cluster.ray
        if self._cluster.watch.find_lost_process() is None:
            with suppress(ray.exceptions.RayError):
                if self._end is not None and seconds:
                    ray.wait([self._call], timeout=seconds)
                ray.kill(self._actor)
        if self._end is not None:
            shut_down(self._end)

    def _await_place(self) -> tuple[Place, str]:
        """Wait until Ray has started the actor.

        Raises EngineError where it finds no room, UnsupportedError where the actor does not see the folder.
        """
        ray, token = self._cluster.ray, secrets.token_hex(8)
        mark = self._output.with_suffix(".mark")
        mark.write_text(token, encoding="utf-8")
        try:
            self._call = self._actor.begin.remote(str(self._output), str(mark), token)
            wait_for_room(
                ray,
                lambda seconds: self._is_done(self._call, seconds),
                self._cluster.share,
                who=f"replica {self._number} of the generator",
                remedy="lower generator.replicas, or what each takes",
            )
            try:
                answer: tuple[Place, str] | None = ray.get(self._call)
            except ray.exceptions.RayError as error:
                raise EOFError(describe_death(error)) from error
        finally:
            mark.unlink(missing_ok=True)
        if answer is None:
            raise UnsupportedError(
                f"replica {self._number} of the generator does not see {self._output.parent}, where it finds the weights, on its node",
                remedy="Set run.directory to a folder on a file system that all nodes of the Ray cluster see at the same path",
            )
        return answer

    def _is_done(self, call: Any, seconds: float) -> bool:
        """Wait so long for a call of the actor. Raises EOFError where the replica is not wanted any more."""
        waited = 0.0
        while True:
            if self._ending.is_set():
                raise EOFError("the replica is not wanted any more")
            self._cluster.refuse_lost_ray()
            step = min(WAIT_SECONDS, seconds - waited)
            if self._cluster.ray.wait([call], timeout=max(step, 0.0))[0]:
                return True
            waited += step
            if waited >= seconds:
                return False

    def _accept(self, server: socket.socket, key: bytes) -> socket.socket:
        """Wait for the actor at a listening socket; others that come are turned away. Raises EOFError where it is gone."""
        server.settimeout(WAIT_SECONDS)
        while not self._is_done(self._call, 0.0):
            with suppress(TimeoutError):
                peer, _ = server.accept()
                if has_key(peer, key):
                    notice_loss(peer)
                    return peer
                logger.warning("a stranger came to the port of replica %d and was turned away", self._number)
                peer.close()
        raise EOFError("the actor ended before it was connected")


def has_key(peer: socket.socket, key: bytes) -> bool:
    """Let a peer prove that it has the key, and prove it to the peer, within PROOF_SECONDS each."""
    connection = share_connection(peer)
    _limit_reading(peer, PROOF_SECONDS)
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
    except (AuthenticationError, EOFError, OSError):
        return False
    finally:
        connection.close()
    _limit_reading(peer, 0.0)
    return True


def notice_loss(end: socket.socket) -> None:
    """Close a connection whose peer's machine is silent for LOST_SECONDS; a process that ends closes it at once."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": LOST_SECONDS // 3,
        "TCP_KEEPINTVL": LOST_SECONDS // 6,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": LOST_SECONDS * 1000,
    }
    for name, value in wanted.items():
        # names that only Linux has
        if (option := getattr(socket, name, None)) is not None:
            end.setsockopt(socket.IPPROTO_TCP, option, value)


def refuse_without_room(
    nodes: Sequence[Mapping[str, float]], share: Mapping[str, float], replicas: int, ranks: Mapping[str, float]
) -> None:
    """Raise UnsupportedError where the nodes' resources, were they free, could not hold the replicas, a `share` each, beside the ranks."""
    needed = multiply(share, replicas)
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in share}
    short = any(total[name] - ranks.get(name, 0.0) < amount - 1e-6 for name, amount in needed.items())
    places = sum(
        math.floor(min((node.get(name, 0.0) / amount + 1e-6 for name, amount in share.items() if amount), default=replicas))
        for node in nodes
    )
    if short or places < replicas:
        kinds = Counter(describe_amounts({name: node.get(name, 0.0) for name in share}) for node in nodes)
        there = ", ".join(f"{count} node{'s' * (count > 1)} of {amounts}" for amounts, count in sorted(kinds.items()))
        raise UnsupportedError(
            f"generator.replicas = {replicas} with {describe_amounts(share)} each needs {describe_amounts(needed)} beside the ranks' "
            f"{describe_amounts({name: ranks.get(name, 0.0) for name in share})}, the Ray cluster has {there}",
            remedy="Lower generator.replicas, generator.cpus or generator.gpus, or grow the cluster",
        )


def _limit_reading(end: socket.socket, seconds: float) -> None:
    """Let reads from a socket fail after so long; 0: never. A socket's own timeout would not count for a connection over it."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", math.floor(seconds), 0))
