"""Experts on ranks with different tokens: each rank computes its experts for the tokens of all, and sums go back to those who have the tokens.

As megatron-core's dispatcher "allgather" does; its "alltoall" sends each token to the ranks of its experts alone, which is less where these are
few of many.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_engine_megatron.groups import ExpertRanks
from skyrl_engine_megatron.library import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region

NO_EXPERT = -1
"""The number of the expert of tokens that are none, by which ranks with fewer tokens fill up."""


def run_on_all_ranks(
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    tokens_TH: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    ranks: ExpertRanks,
    most: int,
) -> Tensor:
    """Return the sums over all ranks of `run` over this rank's tokens, [tokens, h]; no rank has more than `most` tokens.

    The backward pass sums the gradients of tokens and weights that all ranks have.
    """
    count = len(tokens_TH)

    def gather(own: Tensor) -> Tensor:
        gathered: Tensor = gather_from_sequence_parallel_region(_fill(own, most, 0), group=ranks.device)
        return gathered

    own_experts = _fill(experts_TK, most, NO_EXPERT)
    experts_AK = own_experts.new_empty(ranks.size * most, own_experts.shape[1])
    dist.all_gather_into_tensor(experts_AK, own_experts, group=ranks.device)
    sums_AH = run(gather(tokens_TH), gather(weights_TK), experts_AK)
    own_sums: Tensor = reduce_scatter_to_sequence_parallel_region(sums_AH, group=ranks.device)
    return own_sums[:count]


def _fill(rows: Tensor, count: int, value: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)), value=value).contiguous()
