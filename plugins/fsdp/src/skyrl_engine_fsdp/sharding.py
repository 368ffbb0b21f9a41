"""FSDP2 over a scorer: every layer a unit, the root another, gradients summed over ranks and never averaged."""

from dataclasses import replace

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from skyrl_engine.contracts import ComputeDtype
from skyrl_engine.modeling.causal_lm import all_layers, tower_layers
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine_fsdp.meshes import Meshes
from skyrl_engine_fsdp.options import FsdpConfig


def shard(scorer: Scorer, meshes: Meshes, device: torch.device, dtype: ComputeDtype, options: FsdpConfig) -> None:
    """Shard `scorer` in place over the data-parallel ranks and move it to `device`. Tensor parallelism comes before it.

    One rank that computes in the weights' own precision has nothing to shard, cast or offload: it keeps the plain module, which spares the
    copies of all weights and gradients that FSDP2 makes even then.

    bfloat16 computes in bfloat16 and keeps weights, their gradients and the sums over ranks in float32. The head stays in the root's unit: as
    a unit of its own it would be gathered per call, and ranks that differ in calls would wait for each other for ever.
    """
    if meshes.topology.world_size == 1 and dtype != "bfloat16" and not options.cpu_offload:
        scorer.to(device)
        return
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy()
    # a tower is given angles in float32, to turn by in float32; its hidden states come from the root in the precision that computes
    seeing = {id(layer) for layer in tower_layers(scorer.decoder)}
    for layer in all_layers(scorer.decoder):
        fully_shard(
            layer,
            mesh=meshes.data,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=replace(policy, cast_forward_inputs=False) if id(layer) in seeing else policy,
            offload_policy=offload,
        )
    # the root's backward comes right after its forward, so gathering its weights again would only cost
    fully_shard(scorer, mesh=meshes.data, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
    for module in units(scorer):  # neither setter reaches nested units, and gloo knows no scaled sum: both are needed on each
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def units(scorer: Scorer) -> list[FSDPModule]:
    """Every module that `shard` made a unit of."""
    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


def reshard(scorer: Scorer) -> None:
    """Free all gathered weights. After a forward without backward the root still holds them, and they would go stale."""
    for module in units(scorer):
        module.reshard()
