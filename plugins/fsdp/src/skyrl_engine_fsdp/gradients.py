"""The global gradient norm over sharded gradients, and clipping to it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank (a collective for a sharded one)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale gradients in place so that their global 2-norm is at most `max_norm`; returns the norm before that, equal on all ranks.

    `max_norm` None never scales. A norm that is not finite scales nothing.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norm = full(
        torch.nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None], foreach=True)
    )
    value = norm.item()
    if max_norm is not None and max_norm < value < float("inf"):
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm, foreach=True)
    return value


def non_finite(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of parameters whose gradient is not finite in this rank's shard."""
    names = []
    for name, parameter in named_parameters:
        if parameter.grad is None:
            continue
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if not torch.isfinite(local).all():
            names.append(name)
    return names
