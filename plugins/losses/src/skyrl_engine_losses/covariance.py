"""Losses that hold back tokens of large covariance of log-probability and advantage, because these tokens lower the entropy.

Cui et al. 2025, arXiv:2505.22617. cov = (A - mean A) (log p - mean log p), with means over the micro-batch's loss-carrying tokens. So these
losses depend on how the batch is divided into micro-batches (`batch_local`).
"""

import math
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import and_, ge, gt, le

from skyrl_engine import LossOutput, LossTokens, loss
from skyrl_engine_losses.clipping import ClipConfig, clip_policy_loss
from skyrl_engine_losses.ratio import approximate_kl, fraction, probability_ratio

if TYPE_CHECKING:
    import torch

_NEEDS = ("logprobs", "old_logprobs", "advantages")
_SHARE = and_(ge(0.0), le(1.0))


@frozen
class ClipCovConfig(ClipConfig):
    """The clipping range of the ratio, and the tokens whose loss is set to 0."""

    fraction: float = field(default=2e-4, validator=_SHARE)
    """Share of a micro-batch's tokens whose loss is set to 0; at least one token, if any qualifies."""

    lower: float = 1.0
    """Only tokens whose covariance is larger than this qualify."""

    upper: float = field(default=5.0)
    """Only tokens whose covariance is smaller than this qualify."""

    @upper.validator
    def _above_lower(self, _attribute: object, value: float) -> None:
        if value <= self.lower:
            raise ValueError(f"must be more than lower = {self.lower}, is {value}")


@frozen
class KlCovConfig:
    """The tokens that are penalised, and the weight of their penalty."""

    fraction: float = field(default=0.2, validator=and_(gt(0.0), le(1.0)))
    """Share of a micro-batch's tokens that are penalised, those of largest covariance; at least one token."""

    coef: float = field(default=1.0, validator=ge(0.0))
    """Weight of the penalty |log p - log old|."""


def covariance(tokens: LossTokens) -> "torch.Tensor":
    """[n], float64: each token's share of the covariance of advantage and log-probability; carries no gradient."""
    # Rounding may not choose among tokens of equal covariance: float32 and float64 would hold back different ones.
    advantages, logprobs = tokens.advantages.double(), tokens.logprobs.detach().double()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


@loss(needs=_NEEDS, config=ClipCovConfig, batch_local=True)
def clip_cov(tokens: LossTokens, config: ClipCovConfig) -> LossOutput:
    """`ppo`, [n], and 0 at max(int(fraction n), 1) random tokens with lower < cov < upper at which clipping took no effect."""
    ratio = probability_ratio(tokens.logprobs, tokens.old_logprobs)
    token_loss, clipped = clip_policy_loss(ratio, tokens.advantages, config)
    cov = covariance(tokens)
    candidates = (cov > config.lower) & (cov < config.upper) & ~clipped
    # one number for every candidate in turn; how many they are is known on the device alone
    drawn = cov.new_empty(len(cov)).uniform_(generator=tokens.generator)[(candidates.cumsum(0) - 1).clamp(min=0)]
    first = drawn.masked_fill(~candidates, math.inf).argsort(stable=True)[: max(int(config.fraction * len(cov)), 1)]
    silenced = clipped.new_zeros(len(cov)).index_fill(0, first, True) & candidates
    return LossOutput(
        token_loss.masked_fill(silenced, 0.0),
        {
            "clip_fraction": fraction(clipped),
            "covariance_clip_fraction": fraction(silenced),
            "approximate_kl": approximate_kl(tokens.logprobs, tokens.old_logprobs),
        },
    )


@loss(needs=_NEEDS, config=KlCovConfig, batch_local=True)
def kl_cov(tokens: LossTokens, config: KlCovConfig) -> LossOutput:
    """-A r, [n], plus coef |log p - log old| at the max(1, int(fraction n)) tokens of largest cov; ties go to the first."""
    ratio = probability_ratio(tokens.logprobs, tokens.old_logprobs)
    cov = covariance(tokens)
    held = cov.argsort(descending=True, stable=True)[: max(1, int(config.fraction * len(cov)))]
    strength = ratio.new_zeros(len(cov)).index_fill(0, held, config.coef)
    return LossOutput(
        -tokens.advantages * ratio + strength * (tokens.logprobs - tokens.old_logprobs).abs(),
        {"approximate_kl": approximate_kl(tokens.logprobs, tokens.old_logprobs)},
    )
