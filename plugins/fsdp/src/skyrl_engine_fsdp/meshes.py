"""The ranks as device meshes: replicas outermost, then shards, then tensor-parallel ranks, as `contracts.topology` numbers them."""

import torch
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
        """Make the meshes and their process groups; every rank must call it."""
        data = {"replicate": replicate} if replicate > 1 else {}
        data["shard"] = topology.dp // replicate
        sizes = {**data, "tensor": topology.tp} if topology.tp > 1 else data
        world = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if topology.tp == 1:
            return cls(topology, replicate, world, None)
        return cls(topology, replicate, world[tuple(data)], world["tensor"])
