"""Attention document by document with torch's scaled dot-product attention, on CPU and CUDA, without flash-attn or Transformer Engine.

megatron-core's own attention outside of Transformer Engine does not support documents, and would store scores of tokens x tokens.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_engine.contracts import AttentionKernel
from skyrl_engine.modeling.attention_kernel import attend_segments, takes_one_row
from skyrl_engine.modeling.compiling import outside
from skyrl_engine.modeling.run_attention import mask_of_run
from skyrl_engine.modeling.segments import Segments
from skyrl_engine_megatron.context import gather_row
from skyrl_engine_megatron.documents import Boundaries
from skyrl_engine_megatron.library import MegatronModule, TransformerConfig, parallel_state


class DocumentAttention(MegatronModule):  # type: ignore[misc] # megatron-core is untyped
    """A `core_attention` of megatron-core for rows of documents: causal, without dropout, over this rank's heads.

    `kernel` is that of subclasses which `attend_by` makes; this class has torch's scaled dot-product attention. Tokens see the last `window`
    tokens (None: all before them), and scores are multiplied by `scaling` (None: 1 / sqrt(d)); `sinks` [heads] are scores that take part in
    the softmax and belong to no token (None: there are none). The layer sets them.
    """

    kernel: AttentionKernel = "sdpa"
    window: int | None = None
    scaling: float | None = None
    sinks: nn.Parameter | None

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        """Ignore the further arguments of a `core_attention` (layer, mask type, groups): this class has nothing to choose."""
        super().__init__(config=config)
        self.register_parameter("sinks", None)

    @outside
    def forward(
        self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, _mask: None = None, *, packed_seq_params: Boundaries, **_: Any
    ) -> Tensor:
        """Return [tokens, heads x d]; `key_TGD` and `value_TGD` have fewer heads if several queries share one."""
        if packed_seq_params.segments is not None or takes_one_row(self.kernel):
            query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query_THD, key_TGD, value_TGD))
            segments = packed_seq_params.segments or Segments(packed_seq_params.lengths)
            attend_document = partial(_attend_document, scaling=self.scaling)
            return attend_segments(
                self.kernel, query, key, value, segments, attend_document, scaling=self.scaling, window=self.window
            )[0].flatten(1)
        lengths = list(packed_seq_params.lengths)
        attend = partial(_attend, scaling=self.scaling, window=self.window, sinks=self.sinks)
        if packed_seq_params.order is None:
            documents = zip(*(torch.split(tensor, lengths) for tensor in (query_THD, key_TGD, value_TGD)), strict=True)
            return torch.cat([attend(*document) for document in documents]).flatten(1)
        ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        key_TGD, value_TGD = (gather_row(tensor, packed_seq_params.order) for tensor in (key_TGD, value_TGD))
        shares = torch.split(query_THD, [length // ranks for length in lengths])
        whole = (torch.split(tensor, lengths) for tensor in (key_TGD, value_TGD))
        outputs = []
        for query, key, value in zip(shares, *whole, strict=True):
            early, late = query.chunk(2)
            for number, chunk in ((rank, early), (2 * ranks - 1 - rank, late)):
                seen = (number + 1) * len(chunk)
                outputs.append(attend(chunk, key[:seen], value[:seen]))
        return torch.cat(outputs).flatten(1)


def attend_by(kernel: AttentionKernel) -> type[DocumentAttention]:
    """Return the class of `core_attention` that attends by the kernel which `model.attention` names."""
    return type("DocumentAttention", (DocumentAttention,), {"kernel": kernel})


def _attend_document(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None) -> Tensor:
    """Attend causally within one document: [1, heads, tokens, d] to [1, tokens, heads, d]."""
    grouped = query.shape[1] != key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2)


def _attend(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, *, scaling: float | None, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attend within one document: [tokens, heads, d]. If there are fewer queries than keys, they belong to the last tokens."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query_THD, key_TGD, value_TGD))
    queries, keys = len(query_THD), len(key_TGD)
    mask = None
    # is_causal would align fewer queries with the first tokens
    if sinks is not None or queries < keys or (window is not None and keys > window):
        mask = mask_of_run(queries, keys - queries, window, query.device)
    if sinks is not None:
        assert mask is not None
        return _attend_with_sinks(query, key, value, mask, sinks, scaling)[0]
    return _attend_document(query, key, value, mask, scaling=scaling)[0]


def _attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks_H: Tensor, scaling: float | None) -> Tensor:
    """Attend as `_attend_document` does, with a score per head that takes its part of the softmax away from all tokens.

    gpt-oss (arXiv 2508.10925, section 2); all scores of a document are in memory at once.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.masked_fill(~mask, float("-inf"))
    with_sinks = torch.cat([scores, sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (with_sinks.softmax(-1)[..., :-1] @ value).transpose(1, 2)
