"""The global norm of gradients, some sharded over ranks and some replicated, and clipping by it."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from skyrl_engine.modeling.norms import clipping_factor, sum_of_squares


def full(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank (a collective if it is sharded), on the device that the ranks communicate on."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(tensor, DTensor)
    # Gathered one mesh dimension at a time: FSDP sharded what tensor parallelism had sharded before it, and comes first in the mesh. DTensor
    # would do the same if asked for all dimensions at once, with a warning.
    for dimension in range(tensor.device_mesh.ndim):
        placements = [Replicate()] * (dimension + 1) + list(tensor.placements[dimension + 1 :])
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None, device: torch.device) -> float:
    """Scale gradients in place so that their global 2-norm is at most `max_norm`, and return the norm before scaling.

    Every rank sums the squares of the shards it holds in float64, each divided by the number of ranks that hold the same shard; one sum over
    all ranks on `device` gives the squared norm. So the norm is the same number on all ranks, and not finite on all if it is not finite on one.
    Nothing is scaled if `max_norm` is None or the norm is not finite.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_pieces: defaultdict[int, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_pieces[pieces(gradient)].append(local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for count, parts in by_pieces.items():
        total += sum_of_squares(parts, device) * (count / dist.get_world_size())
    dist.all_reduce(total)
    value = total.sqrt().item()
    if (factor := clipping_factor(value, max_norm)) is not None:
        # empty shards are left out, for foreach kernels on CUDA
        torch._foreach_mul_([part for gradient in gradients if (part := local(gradient)).numel()], factor)
    return value


def non_finite(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Return the names of parameters whose gradient is not finite in this rank's shard."""
    return [
        name
        for name, parameter in named_parameters
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all()
    ]


def local(tensor: Tensor) -> Tensor:
    """Return the part of the tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pieces(tensor: Tensor) -> int:
    """Return the number n of pieces that the tensor is cut into; each piece is held by 1/n of the ranks."""
    if not isinstance(tensor, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in tensor.placements), "a gradient that is still to be summed"
    count = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        count *= 1 if placement.is_replicate() else size
    return count
