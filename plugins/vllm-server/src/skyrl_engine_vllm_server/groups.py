"""The receivers' side of a broadcast per tensor over torch's process groups. Needs torch alone; the trainer is rank 0."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed
LOOPBACK = ("127.0.0.1", "localhost")


def join_group(host: str, port: int, rank: int, world: int, seconds: float, *, nccl: bool = False) -> Any:
    """Meet the trainer at its address, and return a process group beside the default one of this process."""
    limit = timedelta(seconds=seconds)
    store = dist.PrefixStore("weights", dist.TCPStore(host, port, world, is_master=False, timeout=limit, wait_for_workers=False))
    if nccl:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, world, options)
    gloo = dist.ProcessGroupGloo
    settings = gloo._Options()
    settings._devices = [gloo.create_device(hostname="127.0.0.1") if host in LOOPBACK else gloo.create_default_device()]
    settings._timeout = limit
    return gloo(store, rank, world, settings)


def receive(
    group: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    make_buffer: Callable[[Sequence[int], torch.dtype], torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as they come, each in memory of its own."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        tensor = make_buffer(shape, getattr(torch, dtype))
        group.broadcast([tensor], options).wait()
        yield name, tensor
