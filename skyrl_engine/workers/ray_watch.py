"""Notice when Ray itself has ended: its raylet on this machine, through which this process talks to the cluster, or the cluster's GCS.

Ray ends a process whose raylet is gone at its next use of it, and one whose GCS is gone after a minute, with code 1 and without an exception.
So a transport asks this watch before it uses Ray, and raises an error that says what happened.
"""

import contextlib
import logging
import select
import socket
import threading
import time
from typing import Any

POLL_SECONDS = 1.0
"""The GCS is knocked at this often."""

GCS_SECONDS = 40.0
"""A GCS of a cluster that was joined may be away so long: clusters may start another one. Ray ends this process after 60 s."""

OWN_GCS_SECONDS = 3.0
"""That of a cluster that was started for this process never comes back."""

KNOCK_SECONDS = 5.0
"""A connection to the GCS may take so long."""

logger = logging.getLogger(__name__)


class RayWatch:
    """Watches from its making until `close`; `gcs_seconds` is how long the GCS may be away."""

    def __init__(self, ray: Any, *, gcs_seconds: float) -> None:
        self._gcs_seconds = gcs_seconds
        self._raylet = _raylet_of(ray)
        self._gcs = _host_and_port(ray.get_runtime_context().gcs_address)
        self._ended = threading.Event()
        self._known = threading.Event()
        self._lost: str | None = None
        self._wakes, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="ray-watch", daemon=True)
        self._thread.start()

    def find_lost_process(self, within: float = 0.0) -> str | None:
        """Say which process of Ray is gone, waiting `within` seconds for the news; None while none is."""
        if within:
            self._known.wait(within)
        return self._lost

    def close(self) -> None:
        self._ended.set()
        self._wake.send(b"x")
        self._thread.join()
        for descriptor in (self._wakes, self._wake, self._raylet):
            if descriptor is not None:
                descriptor.close()

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._wakes, select.POLLIN)
        if self._raylet is not None:
            poll.register(self._raylet, select.POLLIN)
        last_answer = time.monotonic()
        while not self._ended.is_set():
            readable = [file for file, _ in poll.poll(POLL_SECONDS * 1000)]
            if self._raylet is not None and self._raylet.fileno() in readable and not _is_open(self._raylet):
                self._tell("raylet on this machine")
                return
            if self._gcs is None or readable:
                continue
            if _answers(self._gcs):
                last_answer = time.monotonic()
            elif time.monotonic() - last_answer >= self._gcs_seconds:
                self._tell(f"GCS, the head of the cluster, at {self._gcs[0]}:{self._gcs[1]}")
                return

    def _tell(self, which: str) -> None:
        self._lost = which
        self._known.set()
        logger.error("Ray's %s has ended", which)


def _raylet_of(ray: Any) -> socket.socket | None:
    """Return an idle connection to this machine's raylet, which closes when that ends; None where it cannot be had."""
    node = getattr(ray._private.worker, "_global_node", None)  # noqa: SLF001 - Ray says the socket's name nowhere else
    name = getattr(node, "raylet_socket_name", None)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(name).removeprefix("unix:").removeprefix("//"))
    except OSError as error:
        logger.info("the raylet is not watched: %s", error)
        connection.close()
        return None
    return connection


def _is_open(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return bool(connection.recv(1 << 16))
    return False


def _host_and_port(address: str | None) -> tuple[str, int] | None:
    host, _, port = (address or "").rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() else None


def _answers(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=KNOCK_SECONDS).close()
    except OSError:
        return False
    return True
