"""The global gradient norm over gradients that ranks share in different ways, and clipping to it."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank (a collective for a sharded one), on the device the ranks communicate on."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(tensor, DTensor)
    # Dimension by dimension: FSDP cut what tensor parallelism had cut before, and comes first in the mesh. Asked for all at once, DTensor does
    # the same and warns of it.
    for dimension in range(tensor.device_mesh.ndim):
        placements = [Replicate()] * (dimension + 1) + list(tensor.placements[dimension + 1 :])
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None, device: torch.device) -> float:
    """Scale gradients in place so that their global 2-norm is at most `max_norm`; returns the norm before that, equal on all ranks.

    Every rank adds the squares of what it holds, divided by how many ranks hold the same, and one sum over all ranks on `device` makes the
    norm: it is the same number everywhere, and not finite everywhere as soon as it is on one rank. `max_norm` None never scales. A norm
    that is not finite scales nothing.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    by_pieces: defaultdict[int, list[Tensor]] = defaultdict(list)
    for parameter in trained:
        assert parameter.grad is not None
        by_pieces[pieces(parameter.grad)].append(local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for count, parts in by_pieces.items():
        norm = torch.nn.utils.get_total_norm(parts, foreach=True)
        total += norm.to(device, torch.float64).square() * (count / dist.get_world_size())
    dist.all_reduce(total)
    value = total.sqrt().item()
    if max_norm is not None and max_norm < value < float("inf"):
        by_mesh: defaultdict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
        for parameter in trained:  # one call takes tensors of one mesh alone
            by_mesh[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
        for group in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total.sqrt(), foreach=True)
    return value


def non_finite(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of parameters whose gradient is not finite in this rank's shard."""
    return [
        name
        for name, parameter in named_parameters
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all()
    ]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pieces(tensor: Tensor) -> int:
    """How many pieces it is cut into; every piece is held by so many-th part of the ranks."""
    if not isinstance(tensor, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in tensor.placements), "a gradient that is still to be summed"
    count = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        count *= 1 if placement.is_replicate() else size
    return count
