"""Attention whose scores torch's kernels do not compute: soft caps of Gemma 2, and attention sinks of gpt-oss.

It holds all scores of a document at once, as the models' own code does. No kernel of torch computes them, so there is none to choose.
"""

import torch
from torch import Tensor


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention [rows, tokens, heads, d] for query [rows, heads, tokens, d], key and value [rows, key heads, seen tokens, d].

    A query sees the keys where `seen`, bool [1 or rows, 1, tokens, seen tokens], is true; None: those before it, and itself. A score x becomes
    `softcap * tanh(x / softcap)` (Gemma 2, arXiv 2408.00118, section 2). `sinks` [heads] are scores beside those of the keys, which take their
    share of the weights and have no value (gpt-oss). The softmax is computed in float32 at least.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    # not minus infinity: a row of padding may see nothing at all
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = torch.nn.functional.dropout(weights.to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2)
