"""torch.distributed for one rank: gloo on CPU, NCCL (with gloo for CPU tensors) on CUDA."""

import sys
from datetime import timedelta

from attrs import frozen

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.workers.spec import Device

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@frozen
class Rendezvous:
    """The address at which the ranks of one world meet: rank 0's host and a free port of it."""

    host: str
    port: int


def pick_device(wanted: Device, index: int) -> str:
    """The torch device string of this rank: number `index` of those that torch sees, or the CPU. Raises UnsupportedError."""
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UnsupportedError(
            'run.device = "cuda", and torch finds no CUDA device on this machine',
            remedy='Set run.device to "cpu" or "auto", or install torch for CUDA',
        )
    if wanted == "cpu" or not available:
        return "cpu"
    return f"cuda:{index}"


def join(rank: int, world_size: int, device: str, rendezvous: Rendezvous | None) -> bool:
    """Initialise the default process group unless the embedding program has done so. Returns whether this call made it.

    Raises UnsupportedError when the embedding program's group is of another size.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise UnsupportedError(
                f"this process is in a torch process group of {dist.get_world_size()}, the run has {world_size} ranks",
                remedy='Start the run outside of that group, or set run.launch to "ray"',
            )
        return False
    kind, bound = "gloo", None
    if device.startswith("cuda"):
        kind, bound = "cpu:gloo,cuda:nccl", torch.device(device)
        torch.cuda.set_device(bound)
    hook = sys.excepthook
    if rendezvous is None:
        assert world_size == 1, "a world of several ranks needs a place to meet"
        store = dist.HashStore()  # type: ignore[attr-defined] # public in torch's documentation, not in its exports
        dist.init_process_group(kind, store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT, device_id=bound)
    else:
        dist.init_process_group(
            kind,
            init_method=f"tcp://{rendezvous.host}:{rendezvous.port}",
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=bound,  # else NCCL guesses the device from the rank, which is wrong where each process sees one
        )
    sys.excepthook = hook  # torch puts a "[rank0]" before every line, once more for each group that a process ever joins
    return True


def leave() -> None:
    """Destroy the default process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
