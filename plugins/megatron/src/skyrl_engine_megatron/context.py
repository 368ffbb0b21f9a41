"""Context parallelism: a rank holds two chunks of every document, sees the keys and values of all, and evaluates the objective on all scores.

Each document is cut into 2 cp chunks, of which rank r holds chunks r and 2 cp - 1 - r: early tokens attend to few, late ones to many, and so
every rank has the same work. Rotary positions in megatron-core count tokens in this order too.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_engine_megatron.library import gather_from_sequence_parallel_region, parallel_state


def alignment(ranks: int) -> int:
    """What the length of every document must be a multiple of."""
    return 2 * ranks if ranks > 1 else 1


def tokens_of_rank(lengths: Sequence[int], ranks: int, rank: int) -> Tensor:
    """int64[tokens / ranks]: which tokens of a row of documents of these lengths `rank` holds, in the order in which it holds them."""
    if ranks == 1:
        return torch.arange(sum(lengths))
    held, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * ranks)
        held += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        start += length
    return torch.cat(held)


def order_of_gathered(lengths: Sequence[int], ranks: int) -> Tensor:
    """int64[tokens]: where each token of the row lies in the tokens of all ranks, one rank after another."""
    return torch.cat([tokens_of_rank(lengths, ranks, rank) for rank in range(ranks)]).argsort()


def whole_row(share_TGD: Tensor, order_T: Tensor) -> Tensor:
    """Keys or values of the row's tokens in order, from every rank's share; gradients of all ranks' queries add up on the way back."""
    gathered_TGD: Tensor = gather_from_sequence_parallel_region(
        share_TGD.contiguous(), group=parallel_state.get_context_parallel_group()
    )
    return gathered_TGD.index_select(0, order_T)


def scores_of_all(own_M: Tensor, places_M: Tensor, count: int) -> Tensor:
    """[count]: every rank's scores, each at its places. All ranks evaluate the same objective, so the gradient is cut and not summed."""
    return _ScoresOfAll.apply(own_M, places_M, count)  # type: ignore[no-any-return, no-untyped-call] # torch leaves both untyped


class _ScoresOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_M: Tensor, places_M: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places_M)
        all_N = own_M.new_zeros(count).index_copy(0, places_M, own_M)
        dist.all_reduce(
            all_N, group=parallel_state.get_context_parallel_group()
        )  # places are of one rank each: adding zeros is exact
        return all_N

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (places_M,) = ctx.saved_tensors
        return upstream[0].index_select(0, places_M), None, None
