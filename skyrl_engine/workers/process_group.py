"""torch.distributed for one rank: gloo on CPU, NCCL (with gloo for CPU tensors) on CUDA."""

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from attrs import frozen

from skyrl_engine.contracts.kinds.generator import TensorParallelGroup
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.topology import RankCoords, Topology
from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.model_facts.weight_files import weight_files
from skyrl_engine.workers.spec import Device

if TYPE_CHECKING:
    import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""The longest wait of ranks for each other, apart from that for weights."""

LOADED_PER_SECOND: Final = 50_000_000
"""Bytes of weights that rank 0 reads, converts and sends in a second, at the least: a slow disk over a network."""

FLIGHT_RECORDER: Final = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""Variables by which NCCL keeps its last collectives and writes them where one does not end; older versions of torch use the second name."""


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


def allow_time_to_load(model: ModelConfig) -> None:
    """Let ranks wait for each other as long as rank 0 may take to load the model: the time of any collective, and that of its files.

    The time is what `time_to_load` says on rank 0, which every rank is told; it never becomes shorter. Files on the hub that are not there yet
    count as none. A group that the embedding program has made, with a time of its own, is for that program to set.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    seconds: list[float] = [time_to_load(model).total_seconds() if dist.get_rank() == 0 else 0.0]
    dist.broadcast_object_list(seconds, src=0)
    if seconds[0] > COLLECTIVE_TIMEOUT.total_seconds():
        _set_pg_timeout(timedelta(seconds=seconds[0]))


def time_to_load(model: ModelConfig) -> timedelta:
    """Return how long ranks wait for the one that loads: 30 minutes, and a second for every 50 MB of its files of weights."""
    try:
        size = sum(file.stat().st_size for file in weight_files(model))
    except (EngineError, OSError):
        size = 0  # loading says what is wrong with them
    return COLLECTIVE_TIMEOUT + timedelta(seconds=size / LOADED_PER_SECOND)


def leave() -> None:
    """Destroy the default process group, and with it all that ranks joined."""
    import torch.distributed as dist

    _joined.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def join_tensor_parallel(topology: Topology, place: RankCoords) -> TensorParallelGroup:
    """Join the tensor-parallel ranks that this one stands among; each of them calls this."""
    first = place.rank - place.tp
    return TensorParallelGroup(place.tp, topology.tp, join_ranks(range(first, first + topology.tp)))


_joined: "dict[tuple[tuple[int, ...], str | None], tuple[dist.ProcessGroup, dist.ProcessGroup]]" = {}
"""The groups that ranks joined, each with the default group that it is beside, by ranks and backend."""


def join_ranks(ranks: Iterable[int], backend: str | None = None) -> "dist.ProcessGroup":
    """Return the group of some ranks, each of which calls this; others need not. None: the default group's backend.

    It lasts as long as the default group: torch names it after its ranks, and a second one of this name would find addresses of the first.
    """
    import torch.distributed as dist

    world, key = dist.group.WORLD, (tuple(ranks), backend)
    assert world is not None, "ranks joined before the default group"
    if key not in _joined or _joined[key][0] is not world:
        _joined[key] = world, dist.new_group(list(key[0]), backend=backend, use_local_synchronization=True)
    return _joined[key][1]


def agree_with_first(group: TensorParallelGroup, word: bool) -> bool:
    """Return the word of the first rank of a group, on all its ranks; each of them calls this."""
    import torch
    import torch.distributed as dist

    said = torch.tensor([word], dtype=torch.uint8)
    dist.broadcast(said, src=dist.get_global_rank(group.process_group, 0), group=group.process_group)
    return bool(said.item())
