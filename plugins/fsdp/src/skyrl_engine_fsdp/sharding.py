"""FSDP2 over a scorer: each layer is a unit, the root is another, and gradients are summed over ranks, never averaged."""

from dataclasses import replace

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from skyrl_engine.contracts import ComputeDtype, Topology
from skyrl_engine.modeling.causal_lm import all_layers, tower_layers
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine_fsdp.meshes import Meshes
from skyrl_engine_fsdp.options import FsdpConfig


def shard(scorer: Scorer, meshes: Meshes, device: torch.device, dtype: ComputeDtype, options: FsdpConfig) -> None:
    """Shard `scorer` in place over the data-parallel ranks and move it to `device`. Tensor parallelism must be applied first.

    A single rank that computes in the weights' own precision has nothing to shard, cast or offload: it keeps the plain module and saves the
    copies of all weights and gradients that FSDP2 would make.

    With bfloat16, layers compute in bfloat16, and weights, gradients and the sums over ranks are float32. The head stays in the root's unit:
    as a unit of its own it would be gathered at each call, and ranks that call it a different number of times would deadlock.
    """
    if stays_whole(meshes.topology, dtype, options):
        scorer.to(device)
        return
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    # a vision tower's layers take rotary angles, which must stay float32; the root has already cast the hidden states
    tower = {id(layer) for layer in tower_layers(scorer.decoder)}
    for layer in all_layers(scorer.decoder):
        fully_shard(
            layer,
            mesh=meshes.data,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=replace(policy, cast_forward_inputs=False) if id(layer) in tower else policy,
            offload_policy=offload,
        )
    # the root's backward pass follows right after its forward pass: resharding in between would only gather the weights twice
    fully_shard(scorer, mesh=meshes.data, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
    # neither setter reaches nested units; the second is needed because gloo has no scaled sum
    for module in units(scorer):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def stays_whole(topology: Topology, dtype: ComputeDtype, options: FsdpConfig) -> bool:
    """Return True where weights are neither sharded nor cast nor offloaded."""
    return topology.world_size == 1 and dtype != "bfloat16" and not options.cpu_offload


def units(scorer: Scorer) -> list[FSDPModule]:
    """Return every module that `shard` made an FSDP unit."""
    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


def reshard(scorer: Scorer) -> None:
    """Free all gathered weights: after a forward pass without backward the root still holds them, and a step would not update them."""
    for module in units(scorer):
        module.reshard()
