"""torch.distributed for one rank: gloo on CPU, NCCL (with gloo beside it for CPU tensors) on CUDA."""

from datetime import timedelta

from attrs import frozen

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.workers.spec import Device

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@frozen
class Rendezvous:
    """Where the ranks of one world meet: rank 0's host and a free port of it."""

    host: str
    port: int


def pick_device(wanted: Device, local_rank: int) -> str:
    """The torch device string of this rank."""
    import torch

    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UnsupportedError('device = "cuda", but torch sees no CUDA device here', remedy='Set run.device to "cpu" or "auto"')
    if wanted == "cpu" or not available:
        return "cpu"
    return f"cuda:{local_rank % torch.cuda.device_count()}"


def join(rank: int, world_size: int, device: str, rendezvous: Rendezvous | None) -> bool:
    """Initialise the default process group unless the embedding program has done so. Returns whether this call made it."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        assert dist.get_world_size() == world_size, "the embedding program's process group has another size than the run"
        return False
    kind = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if rendezvous is None:
        assert world_size == 1, "a world of several ranks needs a place to meet"
        store = dist.HashStore()  # type: ignore[attr-defined] # public in torch's documentation, not in its exports
        dist.init_process_group(kind, store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group(
            kind,
            init_method=f"tcp://{rendezvous.host}:{rendezvous.port}",
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    return True


def leave() -> None:
    """Destroy the default process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
