"""The ranks as device meshes: replicas outermost, then shards, then tensor-parallel ranks, as `contracts.topology` numbers them.

Context-parallel ranks are shards next to each other.
"""

from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skyrl_engine.contracts import Topology
from skyrl_engine.modeling.context_parallel import ContextRanks
from skyrl_engine_fsdp.options import count_sharding_ranks


@frozen(eq=False)
class Meshes:
    """The device meshes of a layout: `data`, over which FSDP shards, and `tensor`, or None without tensor parallelism.

    `data` has one dimension, or two (replicas, shards) under hybrid sharding. `context` are the ranks that share this one's rows, or None.
    `experts` are the ranks that share experts apart from layers, or None without expert parallelism.
    """

    topology: Topology
    replicate: int
    data: DeviceMesh
    tensor: DeviceMesh | None
    context: ContextRanks | None
    experts: "ExpertHolders | None" = None

    @classmethod
    def of(cls, topology: Topology, *, replicate: int, device: torch.device, expert_ranks: int = 1) -> "Meshes":
        """Return the meshes of this layout, made with their process groups when this process first asks; every rank must call it.

        Models of one layout share them: a policy and its reference would else hold a communicator each, and every model that a
        process ever opened would leave its groups' threads running.
        """
        key = (topology, replicate, device.type, expert_ranks)
        if _world[:] != [dist.group.WORLD]:
            _made.clear()
            _world[:] = [dist.group.WORLD]
        if key not in _made:
            _made[key] = cls._new(topology, replicate, device, expert_ranks)
        return _made[key]

    @classmethod
    def _new(cls, topology: Topology, replicate: int, device: torch.device, expert_ranks: int) -> "Meshes":
        data = {"replicate": replicate} if replicate > 1 else {}
        data["shard"] = count_sharding_ranks(topology) // replicate
        sizes = {**data, "tensor": topology.tp} if topology.tp > 1 else data
        world = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        context = _make_context_ranks(topology) if topology.cp > 1 else None
        experts = ExpertHolders.of(topology, replicate, device, expert_ranks) if expert_ranks > 1 else None
        if topology.tp == 1:
            return cls(topology, replicate, world, None, context, experts)
        return cls(topology, replicate, world[tuple(data)], world["tensor"], context, experts)


@frozen(eq=False)
class ExpertHolders:
    """The ranks of a copy of the model in groups that share the experts of every layer.

    A group, `holders`, is some data-parallel or context-parallel ranks next to each other, with all tensor-parallel ranks of each. Those of it
    that have the same place among tensor-parallel ranks, and so different tokens, `exchange` rows. FSDP shards experts over `shards`, the ranks
    that hold the same ones, with replicas first.
    """

    shards: DeviceMesh
    holders: DeviceMesh
    exchange: dist.ProcessGroup

    @classmethod
    def of(cls, topology: Topology, replicate: int, device: torch.device, expert_ranks: int) -> "ExpertHolders":
        """Return the groups in which `expert_ranks` ranks with different tokens share experts; every rank must call it."""
        shards = count_sharding_ranks(topology) // (replicate * expert_ranks)
        outer = {"replicate": replicate, "expert_shard": shards} if replicate > 1 else {"expert_shard": shards}
        sizes = {**outer, "expert": expert_ranks * topology.tp}
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        exchange = mesh["expert"].get_group()
        if topology.tp > 1:
            ranks = torch.arange(topology.world_size).view(-1, expert_ranks, topology.tp).transpose(1, 2)
            exchange, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, expert_ranks).tolist())  # type: ignore[no-untyped-call] # torch leaves it untyped
        return cls(mesh[tuple(outer)], mesh["expert"], exchange)


def _make_context_ranks(topology: Topology) -> ContextRanks:
    """Make the groups of ranks that differ in their context-parallel number alone; every rank must call it."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in range(topology.world_size):
        coords = topology.coords(rank)
        groups.setdefault((coords.dp, coords.tp), []).append(rank)
    own, _ = dist.new_subgroups_by_enumeration(list(groups.values()))  # type: ignore[no-untyped-call] # torch leaves it untyped
    return ContextRanks.of(own)


_made: dict[tuple[Topology, int, str, int], Meshes] = {}
_world: list[Any] = []
"""The default process group that `_made` belongs to; an embedding program may replace it."""
