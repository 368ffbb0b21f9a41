"""Policy gradients: -w A log p, where the weight w corrects for the policy that sampled the tokens and carries no gradient."""

import math
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt, le

from skyrl_engine import LossOutput, LossTokens, Metric, loss
from skyrl_engine_losses.clipping import ClipConfig
from skyrl_engine_losses.ratio import LOG_RATIO_LIMIT, AnchoredConfig, approximate_kl, fraction, log_ratio, probability_ratio

if TYPE_CHECKING:
    import torch


@frozen
class CispoConfig(AnchoredConfig):
    """The clipping range of the weight, and the policy in its denominator."""

    clip_low: float = field(default=1.0, validator=[ge(0.0), le(1.0)])
    """The weight is at least 1 - `clip_low`."""

    clip_high: float = field(default=4.0, validator=ge(0.0))
    """The weight is at most 1 + `clip_high`."""


@loss(needs=("logprobs", "advantages"), homogeneous=True)
def reinforce(tokens: LossTokens, _config: None) -> "torch.Tensor":
    """-A log p, [n]: the policy gradient of tokens that the policy itself sampled (Williams 1992, Machine Learning 8)."""
    return -tokens.advantages * tokens.logprobs


@loss(needs=lambda config: ("logprobs", config.column, "advantages"), config=CispoConfig, homogeneous=True)
def cispo(tokens: LossTokens, config: CispoConfig) -> LossOutput:
    """-A sg(clip(r, 1 - clip_low, 1 + clip_high)) log p, [n]: MiniMax 2025, arXiv:2506.13585, section 3.1.

    The weight is clipped, never the update: every token keeps a gradient.
    """
    anchor = tokens.needs[config.column]
    ratio = probability_ratio(tokens.logprobs.detach(), anchor)
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return LossOutput(
        -tokens.advantages * weight * tokens.logprobs,
        {"clip_fraction": fraction(weight != ratio), "approximate_kl": approximate_kl(tokens.logprobs, anchor)},
    )


@frozen
class VespoConfig(AnchoredConfig):
    """The weight of a sequence by its ratio w, w^k exp(lambda (1 - w)), for each sign of the advantage."""

    k_pos: float = field(default=2.0, validator=ge(0.0))
    """Exponent where the advantage is not negative."""

    lambda_pos: float = field(default=3.0, validator=gt(0.0))
    """Rate of decay there."""

    k_neg: float = field(default=3.0, validator=ge(0.0))
    """Exponent where the advantage is negative."""

    lambda_neg: float = field(default=2.0, validator=gt(0.0))
    """Rate of decay there."""


_LOWEST_RATIO = math.log(1e-8)
"""The least log-ratio of a sequence, in nats; the largest is LOG_RATIO_LIMIT."""

_LEAST_EXPONENT = math.log(1e-30)
"""A weight below its exponential is 0: numbers that are smaller lose digits in float32, and mean the same."""


@loss(needs=lambda config: ("logprobs", config.column, "advantages"), config=VespoConfig, homogeneous=True)
def vespo(tokens: LossTokens, config: VespoConfig) -> LossOutput:
    """-A sg(w^k exp(lambda (1 - w))) log p, [n], with w the ratio of a sequence's probabilities: VESPO, arXiv:2602.10693.

    The weight is 1 at w = 1 and falls to 0 on both sides. Log-ratios are clamped to +-20 nats per token, and to [log 1e-8, 20] per sequence.
    Weights below 1e-30 are 0.
    """
    anchor = tokens.needs[config.column]
    difference = log_ratio(tokens.logprobs.detach(), anchor)
    log_w = tokens.sequences.broadcast(tokens.sequences.sum(difference).clamp(_LOWEST_RATIO, LOG_RATIO_LIMIT))
    gains = tokens.advantages >= 0
    k = difference.new_full(difference.shape, config.k_neg).masked_fill(gains, config.k_pos)
    rate = difference.new_full(difference.shape, config.lambda_neg).masked_fill(gains, config.lambda_pos)
    exponent = rate + k * log_w - rate * log_w.exp()
    weight = exponent.exp().masked_fill(exponent < _LEAST_EXPONENT, 0.0)
    return LossOutput(
        -tokens.advantages * weight * tokens.logprobs,
        {
            "sequence_weight": Metric.mean(weight.sum(), len(weight)),
            "approximate_kl": approximate_kl(tokens.logprobs, anchor),
        },
    )


@loss(needs=("logprobs", "rollout_logprobs", "advantages"), config=ClipConfig, homogeneous=True)
def rollout_is(tokens: LossTokens, config: ClipConfig) -> LossOutput:
    """-sg(q if 1 - clip_low < q < 1 + clip_high else 0) A log p, [n], with q the ratio to the sampler's own policy.

    Double-sided importance sampling of GLM-5 (2026, arXiv:2602.15763): it needs no old policy, and tokens far from the sampler have no loss.
    """
    ratio = probability_ratio(tokens.logprobs.detach(), tokens.rollout_logprobs)
    inside = (ratio > 1 - config.clip_low) & (ratio < 1 + config.clip_high)
    return LossOutput(
        -tokens.advantages * ratio.where(inside, 0.0) * tokens.logprobs,
        {"clip_fraction": fraction(~inside), "approximate_kl": approximate_kl(tokens.logprobs, tokens.rollout_logprobs)},
    )
