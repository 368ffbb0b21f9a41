"""The ratio of two policies' probabilities of a token, and the metrics that report it.

Log-ratios are clamped to +-20 before the exponential, so that a token on which the policies disagree extremely gives a large number (4.9e8)
without a gradient, instead of an infinity that would spoil the whole batch.
"""

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import in_

from skyrl_engine import Metric

if TYPE_CHECKING:
    import torch

LOG_RATIO_LIMIT = 20.0
"""Limit of a log-ratio in nats, on either side."""

Anchor = Literal["old", "rollout"]
"""The policy a ratio is taken against: `old`, frozen when the step began, or `rollout`, the sampler's own."""


@frozen
class AnchoredConfig:
    """The policy in the denominator of a ratio."""

    anchor: Anchor = field(default="old", validator=in_(("old", "rollout")), kw_only=True)
    """The policy that ratios and divergences are taken against: the `old` policy of this step, or the `rollout` policy that sampled the
    tokens."""

    @property
    def column(self) -> str:
        return f"{self.anchor}_logprobs"


def log_ratio(logprobs: "torch.Tensor", anchor: "torch.Tensor") -> "torch.Tensor":
    """[n]: log p - log q in nats, clamped; differentiable in both inside the limits."""
    return (logprobs - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def probability_ratio(logprobs: "torch.Tensor", anchor: "torch.Tensor") -> "torch.Tensor":
    """[n]: p / q, between exp(-20) and exp(20)."""
    return log_ratio(logprobs, anchor).exp()


def approximate_kl(logprobs: "torch.Tensor", anchor: "torch.Tensor") -> Metric:
    """The mean over tokens of r - 1 - log r, in nats.

    For tokens drawn from the anchor, an unbiased and never negative estimate of KL(anchor || policy): estimator k3 of Schulman 2020,
    "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
    """
    difference = log_ratio(logprobs.detach(), anchor)
    return Metric.mean((difference.expm1() - difference).sum(), len(difference))


def fraction(chosen: "torch.Tensor") -> Metric:
    """The share of tokens for which the bool [n] `chosen` holds."""
    return Metric.mean(chosen.sum(), len(chosen))
