"""Attention document by document with torch's scaled dot-product attention, on CPU and CUDA, without flash-attn or Transformer Engine.

megatron-core's own attention outside of Transformer Engine does not support documents, and would store scores of tokens x tokens.
"""

from typing import Any

import torch
from torch import Tensor

from skyrl_engine.contracts import AttentionKernel
from skyrl_engine.modeling.attention_kernel import attend_segments, takes_one_row
from skyrl_engine.modeling.compiling import outside
from skyrl_engine.modeling.segments import Segments
from skyrl_engine_megatron.context import gather_row
from skyrl_engine_megatron.documents import Boundaries
from skyrl_engine_megatron.library import MegatronModule, TransformerConfig, parallel_state


class DocumentAttention(MegatronModule):  # type: ignore[misc] # megatron-core is untyped
    """A `core_attention` of megatron-core for rows of documents: causal, without dropout, over this rank's heads.

    `kernel` is that of subclasses which `attend_by` makes; this class has torch's scaled dot-product attention.
    """

    kernel: AttentionKernel = "sdpa"

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        """Ignore the further arguments of a `core_attention` (layer, mask type, groups): this class has nothing to choose."""
        super().__init__(config=config)

    @outside
    def forward(
        self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, _mask: None = None, *, packed_seq_params: Boundaries, **_: Any
    ) -> Tensor:
        """Return [tokens, heads x d]; `key_TGD` and `value_TGD` have fewer heads if several queries share one."""
        if packed_seq_params.segments is not None or takes_one_row(self.kernel):
            query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query_THD, key_TGD, value_TGD))
            segments = packed_seq_params.segments or Segments(packed_seq_params.lengths)
            return attend_segments(self.kernel, query, key, value, segments, _attend_document, scaling=None, window=None)[
                0
            ].flatten(1)
        lengths = list(packed_seq_params.lengths)
        if packed_seq_params.order is None:
            documents = zip(*(torch.split(tensor, lengths) for tensor in (query_THD, key_TGD, value_TGD)), strict=True)
            return torch.cat([_attend(*document) for document in documents]).flatten(1)
        ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        key_TGD, value_TGD = (gather_row(tensor, packed_seq_params.order) for tensor in (key_TGD, value_TGD))
        shares = torch.split(query_THD, [length // ranks for length in lengths])
        whole = (torch.split(tensor, lengths) for tensor in (key_TGD, value_TGD))
        outputs = []
        for query, key, value in zip(shares, *whole, strict=True):
            early, late = query.chunk(2)
            for number, chunk in ((rank, early), (2 * ranks - 1 - rank, late)):
                seen = (number + 1) * len(chunk)
                outputs.append(_attend(chunk, key[:seen], value[:seen]))
        return torch.cat(outputs).flatten(1)


def attend_by(kernel: AttentionKernel) -> type[DocumentAttention]:
    """Return the class of `core_attention` that attends by the kernel which `model.attention` names."""
    return type("DocumentAttention", (DocumentAttention,), {"kernel": kernel})


def _attend_document(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend causally within one document: [1, heads, tokens, d] to [1, tokens, heads, d]."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2)


def _attend(query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> Tensor:
    """Attend within one document: [tokens, heads, d]. If there are fewer queries than keys, they belong to the last tokens."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query_THD, key_TGD, value_TGD))
    queries, keys = len(query_THD), len(key_TGD)
    mask = None
    # is_causal would align fewer queries with the first tokens
    if queries < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return _attend_document(query, key, value, mask)[0]
