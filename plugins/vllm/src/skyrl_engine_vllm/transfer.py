"""The trainer's side of a broadcast per tensor, over torch's process groups. The servers' side is skyrl-engine-vllm-server."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed

from skyrl_engine_vllm.errors import ServerFault

dist: Any = torch.distributed
"""Its names that are made in C++ have no types."""

SHORTEST_NAP, LONGEST_NAP = 1e-4, 5e-3
GRACE_SECONDS = 2.0


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


class TransferGroup:
    """A process group of this process, rank 0, and the workers of one server; so a server that dies takes no other's along."""

    def __init__(self, host: str, port: int, world: int, backend: Literal["gloo", "nccl"], seconds: float) -> None:
        limit = timedelta(seconds=seconds)
        self._nccl, self._seconds = backend == "nccl", seconds
        self._store = dist.TCPStore(host, port, world, is_master=True, timeout=limit, wait_for_workers=False)
        store = dist.PrefixStore("weights", self._store)
        group: Any
        if self._nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit  # noqa: SLF001 it has no other name
            group = dist.ProcessGroupNCCL(store, 0, world, options)
        else:
            settings = dist.ProcessGroupGloo._Options()  # noqa: SLF001 as above
            settings._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
            settings._timeout = limit  # noqa: SLF001
            group = dist.ProcessGroupGloo(store, 0, world, settings)
        self._group = group

    def send(self, tensor: torch.Tensor, has_ended: Callable[[], bool]) -> None:
        """Broadcast a tensor. Raises ServerFault when the other side has ended before it came, or takes it too slowly."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        until, nap, is_last = time.monotonic() + self._seconds, SHORTEST_NAP, False
        try:
            work = self._group.broadcast([tensor.cuda() if self._nccl else tensor], options)
            while not work.is_completed():
                if has_ended() and not is_last:
                    # it may have answered the last tensor before this side sees that it arrived
                    until, is_last = min(until, time.monotonic() + GRACE_SECONDS), True
                if time.monotonic() > until:
                    raise ServerFault("it stopped taking tensors" if is_last else "it did not take a tensor in time")
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP)
            work.wait()
        except RuntimeError as error:
            raise ServerFault(f"the transfer of a tensor failed: {str(error).splitlines()[0]:.200}") from error
