"""Losses for tokens that another policy sampled, without clipping or masking."""

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from skyrl_engine import LossOutput, LossTokens, loss
from skyrl_engine_losses.ratio import approximate_kl

if TYPE_CHECKING:
    import torch

_NEEDS = ("logprobs", "old_logprobs", "advantages")


@frozen
class DroConfig:
    """The strength of the penalty that holds the policy to the old one."""

    beta: float = field(default=0.05, validator=ge(0.0))
    """Weight of half the squared log-ratio."""


@loss(needs=_NEEDS, homogeneous=True)
def importance_sampling(tokens: LossTokens, _config: None) -> LossOutput:
    """-(p / old) A, [n]: the policy gradient of tokens that the old policy sampled, exact however large the ratio.

    The log-ratio is clamped only where the number format would overflow, with room for the advantage: at 80 nats in float32, 700 in float64.
    An infinite ratio times a weight or an advantage of 0 would be NaN, in the gradient of the whole batch.
    """
    difference = tokens.logprobs - tokens.old_logprobs
    ratio = difference.clamp(max=80.0 if difference.element_size() == 4 else 700.0).exp()
    return LossOutput(-ratio * tokens.advantages, {"approximate_kl": approximate_kl(tokens.logprobs, tokens.old_logprobs)})


@loss(needs=_NEEDS, config=DroConfig)
def dro(tokens: LossTokens, config: DroConfig) -> "torch.Tensor":
    """-(A log p - beta / 2 (log p - log old)^2), [n]: Richemond et al. 2024, arXiv:2405.19107, per token."""
    difference = tokens.logprobs - tokens.old_logprobs
    return -(tokens.logprobs * tokens.advantages - config.beta / 2 * difference.square())
