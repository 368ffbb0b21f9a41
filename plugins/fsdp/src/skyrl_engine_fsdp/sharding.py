"""FSDP2 over a scorer: each layer is a unit, the root is another, and gradients are summed over ranks, never averaged."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from skyrl_engine import ModelError, UnsupportedError
from skyrl_engine.contracts import ComputeDtype, ModelConfig, Topology
from skyrl_engine.modeling.causal_lm import all_layers, tower_layers
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine_fsdp.gradients import local
from skyrl_engine_fsdp.meshes import Meshes
from skyrl_engine_fsdp.options import FsdpConfig


def shard(
    scorer: Scorer,
    meshes: Meshes,
    device: torch.device,
    dtype: ComputeDtype,
    options: FsdpConfig,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Shard `scorer` in place over the data-parallel ranks and move it to `device`. Tensor parallelism must be applied first.

    `experts` are modules whose weights ranks share already: each is a unit of its own, over the ranks that hold the same experts.

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
    for layer_experts in experts:
        assert meshes.experts is not None, "experts are divided among ranks of a mesh"
        shards = meshes.experts.shards
        fully_shard(
            layer_experts,
            mesh=shards,
            reshard_after_forward=options.reshard_after_forward,
            shard_placement_fn=_choose_dimension(layer_experts, shards.size(-1)),
            mp_policy=policy,
            offload_policy=offload,
        )
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


def refuse_stochastic_rounding(model: ModelConfig, options: FsdpConfig) -> None:
    """Raise UnsupportedError where weights in bfloat16 alone have no place; planning refuses it before a rank starts."""
    if model.dtype != "bfloat16" or model.lora is not None or options.cpu_offload:
        raise UnsupportedError(
            "stochastic rounding holds all trained weights in bfloat16 on the ranks' devices",
            remedy='Set model.dtype = "bfloat16", without model.lora and backend.cpu_offload, or remove optimizer.stochastic_rounding',
        )


def hold_in_bfloat16(scorer: Scorer) -> None:
    """Hold the shards of weights in bfloat16 from now on, and gradients in float32 as before.

    FSDP2 gives gradients the precision that weights had when its units were made ready, which is done here before the cast; torch takes them
    because `grad_dtype` says so.
    """
    scorer._get_fsdp_state()._lazy_init()  # type: ignore[operator]  # noqa: SLF001 - FSDP2 has no call for it

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        # buffers, such as rotary frequencies, stay as they are
        return tensor.to(torch.bfloat16) if isinstance(tensor, torch.nn.Parameter) else tensor

    scorer._apply(cast)  # type: ignore[no-untyped-call]  # noqa: SLF001 - `to` would cast buffers too
    for parameter in scorer.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32


def _choose_dimension(experts: nn.Module, ranks: int) -> Callable[[nn.Parameter], Shard]:
    """Return the rule by which FSDP divides the weights of experts: along the experts, or along what follows where only that is even."""
    parts = [local(weight) for weight in experts.parameters(recurse=False)]
    uneven = any(len(part) % ranks for part in parts) and not any(part.shape[1] % ranks for part in parts)
    return lambda _weight: Shard(int(uneven))


def stays_whole(topology: Topology, dtype: ComputeDtype, options: FsdpConfig) -> bool:
    """Return True where weights are neither sharded nor cast nor offloaded."""
    return topology.world_size == 1 and dtype != "bfloat16" and not options.cpu_offload


def units(scorer: Scorer) -> list[FSDPModule]:
    """Return every module that `shard` made an FSDP unit."""
    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


def sum_gradients_of(scorer: Scorer, options: FsdpConfig, *, last: bool) -> None:
    """Say what the next backward pass sums over ranks. `last` says that its micro-batch is the last one of a pass, on every rank.

    Copies of the model (hybrid sharding) sum with the last micro-batch alone: until then each shard keeps what its own copy has summed. With
    `gradient_sync = "pass"` the ranks of a copy do too, and each keeps the whole gradient that it has computed, in float32.
    """
    for module in units(scorer):
        if options.gradient_sync == "pass":
            module.set_requires_gradient_sync(last, recurse=False)
        else:
            module.set_requires_all_reduce(last, recurse=False)


def drop_partial_sums(scorer: Scorer) -> None:
    """Forget what a pass that failed before its last micro-batch has accumulated and not yet summed, for which FSDP2 has no call."""
    for module in units(scorer):
        for group in _groups(module):
            group._partial_reduce_output = None  # noqa: SLF001 - FSDP2 has no call for it
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None


def require_whole_sums(scorer: Scorer) -> None:
    """Raise ModelError where a last micro-batch did not reach weights that earlier ones had reached: their sums would be missing."""
    for module in units(scorer):
        if any(group._partial_reduce_output is not None for group in _groups(module)):  # noqa: SLF001 - as above
            raise ModelError(
                f"the last micro-batch of a pass uses no weight of {type(module).__name__}, of which earlier ones have a gradient",
                remedy="Set backend.replicate = 1: copies of the model sum their gradients with the last micro-batch",
            )


def _groups(module: FSDPModule) -> list[Any]:
    """Return a unit's groups of parameters, of which torch 2.13 may have several and earlier ones have one or none."""
    state = module._get_fsdp_state()  # noqa: SLF001 - as above
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups  # noqa: SLF001 - as above
    return [group for group in groups if group is not None]


def reshard(scorer: Scorer) -> None:
    """Free all gathered weights: after a forward pass without backward the root still holds them, and a step would not update them."""
    for module in units(scorer):
        module.reshard()
