"""Sums over tensor-parallel ranks: one in the forward pass, one in the backward pass."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_forward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks in the forward pass; the gradient passes through unchanged, because all ranks compute on with the same sum."""
    return _SumForward.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call] # torch leaves both untyped


def sum_backward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor, equal on all ranks, and sum its gradients over ranks in the backward pass, because each rank uses it differently."""
    return _SumBackward.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call] # torch leaves both untyped


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    # cloned, because autograd may still read the input
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004 - autograd asks for it
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - autograd asks for it
        return upstream, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _sum(upstream, ctx.group), None
