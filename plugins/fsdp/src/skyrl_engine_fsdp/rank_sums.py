"""Sums over tensor-parallel ranks, in one direction of a pass each."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_forward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' tensors; what flows back is each rank's, as all of them go on with the same sum."""
    return _SumForward.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call] # torch leaves both untyped


def sum_backward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor, which all ranks have alike and each uses its own way; what flows back is the sum of theirs."""
    return _SumBackward.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call] # torch leaves both untyped


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)  # others may still read what came in
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
