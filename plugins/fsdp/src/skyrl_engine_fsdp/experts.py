"""Experts divided among tensor-parallel ranks: each rank holds some of them whole, and ranks sum what theirs return.

Transformers' own plan divides every expert along its columns, and keeps gates and projections of one tensor apart by strides. Whole experts
are plain rows of the same tensors, so that sharding, checkpoints and exports treat them as every other weight; memory and communication are the
same, and the work of a rank follows the routing.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from skyrl_engine.modeling.divided_rows import goes_by_tokens, number_own, stand_in_for_foreign
from skyrl_engine_fsdp.layer_styles import indivisible_error
from skyrl_engine_fsdp.parameter_views import view_parameters
from skyrl_engine_fsdp.rank_sums import sum_backward, sum_forward
from skyrl_engine_fsdp.vocabulary import get_local


def divide_weights(name: str, experts: Any, mesh: DeviceMesh) -> int:
    """Leave each rank some experts of a layer whole, in place, and return how many there are.

    Their weights have one entry per expert first. Raises UnsupportedError for other ones.
    """
    count, weights = getattr(experts, "num_experts", None), list(experts.named_parameters(recurse=False))
    if not isinstance(count, int) or not weights or any(len(weight) != count for _, weight in weights):
        raise indivisible_error(f"{name} is a {type(experts).__name__}, whose weights are not one entry per expert")
    if count % mesh.size():
        raise indivisible_error(f"{mesh.size()} ranks cannot share the {count} experts of {name}")
    for weight_name, whole in weights:
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, weight_name, nn.Parameter(part, requires_grad=whole.requires_grad))
    experts.num_experts = count // mesh.size()
    return count


def divide_experts(name: str, decoder: nn.Module, mesh: DeviceMesh) -> None:
    """Divide, in place, the experts of this name among tensor-parallel ranks. Raises UnsupportedError for experts that cannot be divided.

    They are called with hidden states, the numbers of the experts that each token goes to, and their weights, as those of transformers are; or,
    as Llama 4's, with a copy of all hidden states for each expert.
    """
    experts: Any = decoder.get_submodule(name)
    count = divide_weights(name, experts, mesh)
    if len(inspect.signature(type(experts).forward).parameters) == 2:
        _divide_copies(experts, decoder.get_submodule(name.rpartition(".")[0]), count, mesh)
        return
    group, own = mesh.get_group(), count // mesh.size()
    first = mesh.get_local_rank() * own
    stand_in = stand_in_for_foreign(experts, own)
    # transformers' grouped products mask the rows of other ranks' experts where this says that there are some
    experts._is_expert_parallel = True  # noqa: SLF001 - the flag of their own division

    def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, chosen, shares = inputs
        places, foreign = number_own(chosen, first, own, foreign_as=stand_in)
        shares = sum_backward(shares, group).masked_fill(foreign, 0)
        return sum_backward(hidden, group), places, shares

    names = [weight_name for weight_name, _ in experts.named_parameters(recurse=False)] if goes_by_tokens(experts) else []

    def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        hidden, _, shares = inputs
        # a rank to whose experts no token goes takes part in the sums of the backward pass too, and its weights have a gradient of zeros
        reached = (hidden, shares, *(get_local(getattr(module, weight_name)) for weight_name in names))
        nothing = 0 * torch.stack([tensor.flatten()[:1].sum().to(output.dtype) for tensor in reached]).sum()
        return sum_forward(output + nothing, group)

    view_parameters(experts, get_local)
    experts.register_forward_pre_hook(before)
    experts.register_forward_hook(after)


def _divide_copies(experts: Any, layer: Any, count: int, mesh: DeviceMesh) -> None:
    """Let experts, called with `count` copies [count * tokens, h] of all tokens, compute this rank's; a copy is scaled for one expert.

    The layer adds up what its experts return, and what its shared expert does. So the sum of all is returned in the place of the first expert's
    output, and zeros for the others: ranks exchange one number per token and width, and not one per expert too.
    """
    group, own = mesh.get_group(), count // mesh.size()
    first = mesh.get_local_rank() * own

    def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        copies = sum_backward(inputs[0], group).view(count, -1, inputs[0].shape[-1])
        return (copies[first : first + own].flatten(0, 1),)

    def after(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        total = sum_forward(output.view(own, -1, output.shape[-1]).sum(0), group)
        return torch.cat([total, total.new_zeros((count - 1) * len(total), total.shape[1])])

    # the layer adds to this one in place, which torch refuses where it is a view of a DTensor
    layer.shared_expert.register_forward_hook(lambda _module, _inputs, output: output.clone())
    view_parameters(experts, get_local)
    experts.register_forward_pre_hook(before)
    experts.register_forward_hook(after)
