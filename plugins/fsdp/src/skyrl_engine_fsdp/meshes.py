"""The ranks as device meshes: replicas outermost, then shards, then tensor-parallel ranks, as `contracts.topology` numbers them."""

from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skyrl_engine.contracts import Topology


@frozen(eq=False)
class Meshes:
    """The device meshes of a layout: `data`, over which FSDP shards, and `tensor`, or None without tensor parallelism.

    `data` has one dimension, or two (replicas, shards) under hybrid sharding.
    """

    topology: Topology
    replicate: int
    data: DeviceMesh
    tensor: DeviceMesh | None

    @classmethod
    def of(cls, topology: Topology, *, replicate: int, device: torch.device) -> "Meshes":
        """Return the meshes of this layout, made with their process groups when this process first asks; every rank must call it.

        Models of one layout share them: a policy and its reference would else hold a communicator each, and every model that a
        process ever opened would leave its groups' threads running.
        """
        key = (topology, replicate, device.type)
        if _world[:] != [dist.group.WORLD]:
            _made.clear()
            _world[:] = [dist.group.WORLD]
        if key not in _made:
            _made[key] = cls._new(topology, replicate=replicate, device=device)
        return _made[key]

    @classmethod
    def _new(cls, topology: Topology, *, replicate: int, device: torch.device) -> "Meshes":
        data = {"replicate": replicate} if replicate > 1 else {}
        data["shard"] = topology.dp // replicate
        sizes = {**data, "tensor": topology.tp} if topology.tp > 1 else data
        world = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if topology.tp == 1:
            return cls(topology, replicate, world, None)
        return cls(topology, replicate, world[tuple(data)], world["tensor"])


_made: dict[tuple[Topology, int, str], Meshes] = {}
_world: list[Any] = []
"""The default process group that `_made` belongs to; an embedding program may replace it."""
