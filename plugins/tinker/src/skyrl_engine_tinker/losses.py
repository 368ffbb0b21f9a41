"""The losses of the Tinker API by its own definitions, as one loss whose kind stands in a column.

p is the model's log-probability of a target, q the sampler's (`logprobs` of the request), A the advantage, w the weight, r = exp(p - q), and
`low` and `high` bounds of the ratio itself, not distances from 1. Nothing is divided: the reducer is `sum`.

    cross_entropy        -w p
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)
    cispo                -sg(clip(r, low, high)) p A
    dro                  -(p A - beta / 2 (p - q)^2)
    gspo                 -min(s A, clip(s, low, high) A), with s = exp(mean of p - q over the masked tokens of the sequence); its gradient
                         flows through each token's own p: s = sg(s) exp(p - sg(p))

Source: tinker-docs and the page docs/losses.mdx of tinker-cookbook 0.6.1.

The engine is opened with one objective, and requests of one step may ask for several losses. So what a request asks for travels with its
tokens, as everything else that a loss reads. This file is loaded by its path, and no name of it is a plugin that others could choose.
"""

from typing import TYPE_CHECKING

from skyrl_engine import LossTokens, loss

if TYPE_CHECKING:
    import torch

KINDS = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
"""Names of the API; a place in this tuple is what the column `loss_kind` holds."""

COLUMNS = ("loss_kind", "weights", "sampler_logprobs", "advantages", "ratio_low", "ratio_high", "beta", "ratio_mask")
"""Columns that the loss reads, one number per token each."""

LARGEST_LOG_RATIO = 80.0
"""A ratio beyond exp(80) would overflow float32, and an infinite ratio times an advantage of 0 is NaN."""


@loss(needs=("logprobs", *COLUMNS), reducers=("sum",))
def tinker(tokens: LossTokens, _config: None) -> "torch.Tensor":
    """Return each token's loss, [n], by the formula that `loss_kind` names."""
    total = tokens.logprobs * 0.0
    for code, name in enumerate(KINDS):
        (places,) = (tokens.loss_kind == code).nonzero(as_tuple=True)
        if len(places):
            total = total.index_add(0, places, _FORMULAS[name](tokens, places))
    return total


def _cross_entropy(tokens: LossTokens, at: "torch.Tensor") -> "torch.Tensor":
    return -tokens.weights[at] * tokens.logprobs[at]


def _importance_sampling(tokens: LossTokens, at: "torch.Tensor") -> "torch.Tensor":
    return -_ratio(tokens, at) * tokens.advantages[at]


def _ppo(tokens: LossTokens, at: "torch.Tensor") -> "torch.Tensor":
    return _clipped(_ratio(tokens, at), tokens, at)


def _cispo(tokens: LossTokens, at: "torch.Tensor") -> "torch.Tensor":
    ratio = _ratio(tokens, at).detach().clamp(tokens.ratio_low[at], tokens.ratio_high[at])
    return -ratio * tokens.logprobs[at] * tokens.advantages[at]


def _dro(tokens: LossTokens, at: "torch.Tensor") -> "torch.Tensor":
    distance = tokens.logprobs[at] - tokens.sampler_logprobs[at]
    return -(tokens.logprobs[at] * tokens.advantages[at] - tokens.beta[at] / 2 * distance.square())


def _gspo(tokens: LossTokens, at: "torch.Tensor") -> "torch.Tensor":
    # sequences are whole: a request has one loss, and a sequence is of one request
    mask, own = tokens.ratio_mask, tokens.logprobs[at]
    distance = (tokens.logprobs.detach() - tokens.sampler_logprobs) * mask
    counts = tokens.sequences.sum(mask).clamp(min=1)
    mean = tokens.sequences.broadcast(tokens.sequences.sum(distance) / counts)[at]
    ratio = mean.clamp(max=LARGEST_LOG_RATIO).exp() * (own - own.detach()).exp()
    return _clipped(ratio, tokens, at)


def _ratio(tokens: LossTokens, at: "torch.Tensor") -> "torch.Tensor":
    return (tokens.logprobs[at] - tokens.sampler_logprobs[at]).clamp(max=LARGEST_LOG_RATIO).exp()


def _clipped(ratio: "torch.Tensor", tokens: LossTokens, at: "torch.Tensor") -> "torch.Tensor":
    advantages = tokens.advantages[at]
    return -(ratio * advantages).minimum(ratio.clamp(tokens.ratio_low[at], tokens.ratio_high[at]) * advantages)


_FORMULAS = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}
