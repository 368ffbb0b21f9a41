"""A Ray cluster to run on, and room in it for every rank, found in a stated time or refused with a sentence."""

import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.workers.spec import Device

PATIENCE_SECONDS = 300.0
"""A run waits so long for room that others hold in the cluster."""

WORD_SECONDS = 15.0
"""A waiting run says so this often."""

CONNECT_SECONDS = 10.0
"""The cluster's address has so long to answer; Ray itself tries for a quarter of an hour."""

logger = logging.getLogger(__name__)


def import_ray() -> Any:
    """The module, set not to report usage and not to warn. Raises UnsupportedError where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; without it every actor warns
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError(
            f'launch = "ray" needs Ray, which cannot be imported ({error})', remedy="Run `pip install 'skyrl-engine[ray]'`"
        ) from error
    return ray


Connection = Literal["started", "joined", "found"]
"""The way of this process to its cluster: it started it, joined it, or found it joined by the embedding program."""


class _ClusterUse:
    """The engines of this process that use its one cluster, and whether the first of them joined or started it."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.engines = 0
        self.ours = False


_use = _ClusterUse()


def connect(ray: Any, address: str | None, cpus: float) -> Connection:
    """Join the cluster at `address`, or start one on this machine with so many CPUs, or as many as it has.

    A cluster that the embedding program has joined, or another engine of this process, is used as it is. Raises EngineError when nothing
    answers at the address, or Ray does not start here.
    """
    with _use.guard:
        connection = _join_or_start(ray, address, cpus)
        if connection != "found":
            _use.ours, _use.engines = True, 0
        _use.engines += 1
        return connection


def disconnect(ray: Any, *, lost: bool) -> None:
    """Leave the cluster after the last engine of this process, and at once where it is `lost`; never one of the embedding program."""
    with _use.guard:
        _use.engines -= 1
        if _use.ours and (lost or _use.engines <= 0) and ray.is_initialized():
            _use.ours = False
            ray.shutdown()


def _join_or_start(ray: Any, address: str | None, cpus: float) -> Connection:
    if ray.is_initialized():
        return "found"
    if address is None:
        # "local", not None: None would join whatever cluster the environment names
        count = max(math.ceil(cpus), os.cpu_count() or 1)
        try:
            with _own_signal_handlers():
                ray.init(address="local", num_cpus=count, include_dashboard=False, logging_level="error", log_to_driver=False)
        except Exception as error:  # Ray raises a plain Exception where its processes are too slow
            raise EngineError(
                f"Ray did not start on this machine ({_first_line(error)})",
                remedy='Try again when the machine is less busy, join a cluster by run.ray_address, or use one rank with run.launch = "inline"',
            ) from error
        return "started"
    try:
        _knock(address)
        with _own_signal_handlers():
            ray.init(address=address, logging_level="error", log_to_driver=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # Ray does not send its token to an address that is named, unless it is told to
        token = "" if "RAY_AUTH_MODE" in os.environ else ", set RAY_AUTH_MODE=token if the cluster asks for one"
        raise EngineError(
            f"no Ray cluster can be joined at {address} ({_first_line(error)})",
            remedy=f"Check run.ray_address and that `ray status` answers there{token}, or remove it to start Ray on this machine",
        ) from error
    return "joined"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep this process's handlers: Ray's for SIGTERM ends the process at once, where a run ends after its step and writes a checkpoint."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            if callable(handler):  # in place of a default action Ray's handler is the better one: it shuts Ray down
                signal.signal(number, handler)


def _knock(address: str) -> None:
    """Raise OSError when nothing listens at a host:port; other forms of address are left to Ray."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


def end_own_processes(ray: Any, ranks: Sequence[int]) -> None:
    """End what is left of a cluster that was started for this process, and the processes of its `ranks`, by their ids, without Ray's help."""
    for pid in ranks:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(pid, signal.SIGKILL)
    node = getattr(ray._private.worker, "_global_node", None)  # noqa: SLF001 - Ray's own way goes through the processes that are gone
    if node is not None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def rank_resources(device: Device, total: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Return the resources that each rank asks Ray for: a CPU, and a GPU where `device` and the cluster's `total` resources say so.

    Raises UnsupportedError when the whole cluster, were it free, could not hold the ranks.
    """
    uses_gpus = device == "cuda" or (device == "auto" and total.get("GPU", 0) >= 1)
    resources = {"CPU": 1.0, **({"GPU": 1.0} if uses_gpus else {})}
    short = [name for name, amount in resources.items() if total.get(name, 0) < amount * ranks]
    if short:
        raise UnsupportedError(
            f"run.ranks = {ranks} needs {describe_amounts(multiply(resources, ranks))}, "
            f"the Ray cluster has {describe_amounts({name: total.get(name, 0) for name in resources})}",
            remedy="Lower run.ranks, grow the cluster" + (', or set run.device = "cpu"' if "GPU" in short else ""),
        )
    return resources


def wait_for_room(ray: Any, is_there: Callable[[float], bool], needed: Mapping[str, float], *, who: str, remedy: str) -> None:
    """Wait until `is_there(seconds)`, which itself waits so long, says that the cluster gave `who` what is `needed`, saying so meanwhile.

    Raises EngineError with the remedy after PATIENCE_SECONDS.
    """
    started = time.monotonic()
    while not is_there(min(WORD_SECONDS, PATIENCE_SECONDS)):
        free = ray.available_resources()
        have = describe_amounts({name: free.get(name, 0) for name in needed})
        waited = time.monotonic() - started
        if waited >= PATIENCE_SECONDS:
            raise EngineError(
                f"the Ray cluster made no room for {who} in {waited:.0f} s: needed are {describe_amounts(needed)}, free are {have}",
                remedy=f"Wait for other work on the cluster to end, or {remedy}",
            )
        logger.warning(
            "waiting for the Ray cluster to make room for %s: needed are %s, free are %s", who, describe_amounts(needed), have
        )


def multiply(resources: Mapping[str, float], count: int) -> dict[str, float]:
    """Return the resources of several that need the same."""
    return {name: amount * count for name, amount in resources.items()}


def describe_death(error: Exception) -> str:
    """Return Ray's own account of an actor's end, on one line and without its guesses at what could have happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower() or "memory" in line.lower()]
    account, _, _ = (telling or lines or [type(error).__name__])[0].partition("Some common causes")
    return account.strip().rstrip(".")


def by_machine(machines: Sequence[str]) -> list[int]:
    """Positions, those of one machine next to each other, so that neighbouring ranks talk within a machine."""
    first = {machine: place for place, machine in reversed(list(enumerate(machines)))}
    return sorted(range(len(machines)), key=lambda place: first[machines[place]])


def describe_amounts(resources: Mapping[str, float]) -> str:
    """Return `2 CPU and 1 GPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
