"""The losses of the Tinker API by its own definitions.

p is the model's log-probability of a target, q the sampler's (`logprobs` of the request), A the advantage, w the weight, r = exp(p - q), and
`low` and `high` bounds of the ratio itself, not distances from 1. Nothing is divided: the reducer is `sum`.

    cross_entropy        -w p, of several targets the sum over them
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)
    cispo                -sg(clip(r, low, high)) p A
    dro                  -(p A - beta / 2 (p - q)^2)
    gspo                 -min(s A, clip(s, low, high) A), with s = exp(mean of p - q over the masked tokens of the sequence); its gradient
                         flows through each token's own p: s = sg(s) exp(p - sg(p))

Source: tinker-docs and the page docs/losses.mdx of tinker-cookbook 0.6.1.

Inputs of a request and its options are columns of the batch under their own names, but for `logprobs`, which is a score of the model's here:
bounds and weights may differ from token to token. This file is loaded by its path, and no name of it is a plugin that others could choose.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from skyrl_engine import LossTokens, loss

if TYPE_CHECKING:
    import torch

Inputs = Mapping[str, float | None]

_POLICY: Inputs = {"logprobs": None, "advantages": None}
_BOUNDS: Inputs = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
INPUTS: Mapping[str, Inputs] = {
    "cross_entropy": {"weights": 1.0},
    "importance_sampling": _POLICY,
    "ppo": {**_POLICY, **_BOUNDS},
    "cispo": {**_POLICY, **_BOUNDS},
    "dro": {**_POLICY, "beta": 0.05},
    "gspo": {**_POLICY, **_BOUNDS, "sequence_ratio_mask": None},
}
"""Inputs of every loss besides `target_tokens`, with their defaults; None: the client must send it.

Defaults of ppo are documented by the API; those of the others stand in its examples."""

OPTIONS = ("clip_low_threshold", "clip_high_threshold", "beta")
"""Inputs that may be given for all tokens at once, in `loss_fn_config`."""

COLUMNS = {"logprobs": "sampler_logprobs"}
"""Columns of inputs that have another name there."""

SEVERAL = "cross_entropy_of_several"
"""`cross_entropy` of targets (N, K)."""

LARGEST_LOG_RATIO = 80.0
"""A ratio beyond exp(80) would overflow float32, and an infinite ratio times an advantage of 0 is NaN."""

_SAMPLED = ("logprobs", "sampler_logprobs", "advantages")
_CLIPPED = (*_SAMPLED, "clip_low_threshold", "clip_high_threshold")


@loss(needs=("logprobs", "weights"), reducers=("sum",))
def cross_entropy(tokens: LossTokens, _config: None) -> "torch.Tensor":
    return -tokens.weights * tokens.logprobs


@loss(needs=("logprobs_at:target_tokens", "weights[k]"), reducers=("sum",))
def cross_entropy_of_several(tokens: LossTokens, _config: None) -> "torch.Tensor":
    return -(tokens.weights * tokens.logprobs_at("target_tokens")).sum(1)


@loss(needs=_SAMPLED, reducers=("sum",))
def importance_sampling(tokens: LossTokens, _config: None) -> "torch.Tensor":
    return -_compute_ratio(tokens) * tokens.advantages


@loss(needs=_CLIPPED, reducers=("sum",))
def ppo(tokens: LossTokens, _config: None) -> "torch.Tensor":
    return _clip(_compute_ratio(tokens), tokens)


@loss(needs=_CLIPPED, reducers=("sum",))
def cispo(tokens: LossTokens, _config: None) -> "torch.Tensor":
    ratio = _compute_ratio(tokens).detach().clamp(tokens.clip_low_threshold, tokens.clip_high_threshold)
    return -ratio * tokens.logprobs * tokens.advantages


@loss(needs=(*_SAMPLED, "beta"), reducers=("sum",))
def dro(tokens: LossTokens, _config: None) -> "torch.Tensor":
    distance = tokens.logprobs - tokens.sampler_logprobs
    return -(tokens.logprobs * tokens.advantages - tokens.beta / 2 * distance.square())


@loss(needs=(*_CLIPPED, "sequence_ratio_mask"), reducers=("sum",))
def gspo(tokens: LossTokens, _config: None) -> "torch.Tensor":
    mask, own, sequences = tokens.sequence_ratio_mask, tokens.logprobs, tokens.sequences
    distance = (own.detach() - tokens.sampler_logprobs) * mask
    mean = sequences.sum(distance) / sequences.sum(mask).clamp(min=1)
    ratio = sequences.broadcast(mean).clamp(max=LARGEST_LOG_RATIO).exp() * (own - own.detach()).exp()
    return _clip(ratio, tokens)


def _compute_ratio(tokens: LossTokens) -> "torch.Tensor":
    return (tokens.logprobs - tokens.sampler_logprobs).clamp(max=LARGEST_LOG_RATIO).exp()


def _clip(ratio: "torch.Tensor", tokens: LossTokens) -> "torch.Tensor":
    bounded = ratio.clamp(tokens.clip_low_threshold, tokens.clip_high_threshold)
    return -(ratio * tokens.advantages).minimum(bounded * tokens.advantages)
