"""Context parallelism: a rank holds two chunks of every document, attends to the keys and values of all, and sees all scores.

Each document is cut into 2 cp chunks, of which rank r holds chunks r and 2 cp - 1 - r. Early tokens attend to few keys and late ones to many,
so each rank has the same work. megatron-core's rotary positions follow the same order of tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skyrl_engine_megatron.library import gather_from_sequence_parallel_region, parallel_state


def alignment(ranks: int) -> int:
    """Return the number that must divide the length of every document."""
    return 2 * ranks if ranks > 1 else 1


def tokens_of_rank(lengths: Sequence[int], ranks: int, rank: int) -> Tensor:
    """Return int64[tokens / ranks], the tokens that `rank` holds of a row of documents of these lengths, in its own order."""
    if ranks == 1:
        return torch.arange(sum(lengths))
    own_chunks, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * ranks)
        own_chunks += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        start += length
    return torch.cat(own_chunks)


def order_after_gather(lengths: Sequence[int], ranks: int) -> Tensor:
    """Return int64[tokens], the place of each token of the row in the concatenation of all ranks' tokens."""
    return torch.cat([tokens_of_rank(lengths, ranks, rank) for rank in range(ranks)]).argsort()


def gather_row(share_TGD: Tensor, order_T: Tensor) -> Tensor:
    """Gather keys or values of all ranks in the row's order; the backward pass sums the gradients of all ranks' queries."""
    gathered_TGD: Tensor = gather_from_sequence_parallel_region(
        share_TGD.contiguous(), group=parallel_state.get_context_parallel_group()
    )
    return gathered_TGD.index_select(0, order_T)
