"""The scores of a micro-batch whose tokens context-parallel ranks divide: each rank computes those of its tokens, and all see all of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.modeling.aligned_divergence import AlignedStates
from skyrl_engine.modeling.context_parallel import ContextRanks


@frozen(eq=False)
class ScoredPart:
    """A rank's part of the scores of a micro-batch: those at `places` int64[m], on the device, among `count`.

    `micro_batch` has labels, candidates and a teacher's states of this part alone. A teacher of another tokenizer compares groups of tokens,
    which may lie on several ranks: then it has those of all, and `spread` gathers the hidden states that they belong to.
    """

    micro_batch: MicroBatch
    places: Tensor
    count: int
    ranks: ContextRanks
    spread: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, micro_batch: MicroBatch, places: Tensor, ranks: ContextRanks, move: Callable[[Tensor], Tensor]) -> "ScoredPart":
        """Take the part at `places` int64[m], which are on the CPU; `move` sends a tensor to the device."""
        on_device, count, teacher = move(places), len(micro_batch.labels), micro_batch.teacher
        if isinstance(teacher, AlignedStates):
            return cls(micro_batch, on_device, count, ranks, lambda own_MH: gather_states(own_MH, on_device, count, ranks.group))
        part = evolve(
            micro_batch,
            labels=micro_batch.labels[places],
            candidates={column: ids[places] for column, ids in micro_batch.candidates.items()},
            teacher=None if teacher is None else evolve(teacher, hidden=teacher.hidden.index_select(0, on_device)),
        )
        return cls(part, on_device, count, ranks)

    def join(self, scores: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the scores of all ranks, each [n], from those of this part; their gradient reaches each rank's own tokens once."""
        if self.spread is not None:
            # every rank has compared the whole micro-batch
            return {name: keep_gradient_of_first(values, self.ranks.group) for name, values in scores.items()}
        return {name: gather_scores(values, self.places, self.count, self.ranks.group) for name, values in scores.items()}


def gather_scores(own_M: Tensor, places_M: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Return [count, ...], the scores [m, ...] of all ranks at their places.

    All ranks evaluate the same objective, so the backward pass gives each rank the gradient of its own scores, without a sum.
    """
    return _ScoresOfAll.apply(own_M, places_M, count, group, False)  # type: ignore[no-any-return, no-untyped-call] # torch leaves both untyped


def gather_states(own_MH: Tensor, places_M: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Return [count, h], the states [m, h] of all ranks at their places; the backward pass sums the gradients that the ranks give them."""
    return _ScoresOfAll.apply(own_MH, places_M, count, group, True)  # type: ignore[no-any-return, no-untyped-call] # torch leaves both untyped


def keep_gradient_of_first(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor; its gradient is kept on the first rank of `group`, and is zero on the others, which go on differentiating.

    It is for gradients that all ranks compute equally, where what comes next adds up the gradients of all of them.
    """
    if dist.get_world_size(group) == 1:
        return tensor
    return _GradientOfFirst.apply(tensor, dist.get_rank(group) == 0)  # type: ignore[no-any-return, no-untyped-call] # torch leaves both untyped


class _GradientOfFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] if ctx.is_first else torch.zeros_like(upstream[0]), None


class _ScoresOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_M: Tensor, places_M: Tensor, count: int, group: dist.ProcessGroup, sums: bool) -> Tensor:
        ctx.group, ctx.sums = group, sums
        ctx.save_for_backward(places_M)
        all_N = own_M.new_zeros(count, *own_M.shape[1:]).index_copy(0, places_M, own_M)
        # each place belongs to one rank, so the sum adds zeros alone and is exact
        dist.all_reduce(all_N, group=group)
        return all_N

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (places_M,) = ctx.saved_tensors
        gradient_N = upstream[0]
        if ctx.sums:
            gradient_N = gradient_N.contiguous().clone()
            dist.all_reduce(gradient_N, group=ctx.group)
        return gradient_N.index_select(0, places_M), None, None, None, None
