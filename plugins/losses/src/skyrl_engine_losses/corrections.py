"""Corrections of the gap between the sampler and the old policy, by rho = exp(clamp(log old - log rollout, -20, 20)), and two selections.

Use them in this order: `outlier_sequence`, `token_mask`, `tis`, `sequence_mask`, `off_policy_sequence_mask`, `top_entropy`. A ratio equal to a
bound is inside the range.
"""

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, lt, optional

from skyrl_engine import LossTokens, correction
from skyrl_engine_losses.ratio import Anchor, AnchoredConfig, log_ratio, probability_ratio

if TYPE_CHECKING:
    import torch

_NEEDS = ("old_logprobs", "rollout_logprobs")


def _refuse_empty_range(low: float, high: float) -> None:
    if high < low:
        raise ValueError(f"must be at least low = {low}, is {high}")


@frozen
class OutlierSequenceConfig:
    """The range in which every token's ratio must lie."""

    low: float = field(default=1e-4, validator=ge(0.0))
    """Smallest ratio."""

    high: float = field(default=100.0)
    """Largest ratio."""

    @high.validator
    def _above_low(self, _attribute: object, value: float) -> None:
        _refuse_empty_range(self.low, value)


@frozen
class TokenMaskConfig:
    """The range in which a token's ratio must lie."""

    low: float = field(default=0.5, validator=ge(0.0))
    """Smallest ratio."""

    high: float = field(default=5.0)
    """Largest ratio."""

    @high.validator
    def _above_low(self, _attribute: object, value: float) -> None:
        _refuse_empty_range(self.low, value)


@frozen
class TisConfig:
    """The ratio that multiplies the loss, and the value at which it is truncated."""

    ratio: Literal["token", "sequence"] = field(default="token", validator=in_(("token", "sequence")))
    """`token`: each token's own ratio; `sequence`: at every token, the product of the ratios of its sequence."""

    high: float | None = field(default=None, validator=optional(gt(0.0)))
    """Largest ratio: larger ones are truncated to it; none: 2 with `token`, 5 with `sequence`."""

    @property
    def limit(self) -> float:
        return {"token": 2.0, "sequence": 5.0}[self.ratio] if self.high is None else self.high


@frozen
class SequenceMaskConfig:
    """The range in which a sequence's ratio must lie."""

    mean: Literal["geometric", "product"] = field(default="geometric", validator=in_(("geometric", "product")))
    """The ratio of a sequence: the `geometric` mean or the `product` of its tokens' ratios."""

    low: float | None = field(default=None, validator=optional(ge(0.0)))
    """Smallest ratio; none: 0.99 with `geometric`, 0.5 with `product`."""

    high: float | None = field(default=None)
    """Largest ratio; none: 1.01 with `geometric`, 2 with `product`."""

    @high.validator
    def _above_low(self, _attribute: object, _value: float | None) -> None:
        _refuse_empty_range(*self.bounds)

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = {"geometric": (0.99, 1.01), "product": (0.5, 2.0)}[self.mean]
        return low if self.low is None else self.low, high if self.high is None else self.high


@frozen
class OffPolicySequenceMaskConfig(AnchoredConfig):
    """The distance from the sampler at which sequences of negative advantage are dropped, and the policy that it is measured from."""

    threshold: float = field(default=0.5, validator=[ge(0.0), lt(float("inf"))])
    """Largest mean over a sequence of log q - log p, in nats per token, with q the anchor."""

    anchor: Anchor = field(default="rollout", validator=in_(("old", "rollout")), kw_only=True)
    """The policy q: `rollout`, which sampled the tokens, or the `old` policy of this step."""


@frozen
class TopEntropyConfig:
    """The share of tokens that keep their loss."""

    share: float = field(default=0.2, validator=[ge(0.0), le(1.0)])
    """Share of the batch's tokens, those of largest entropy; 0 keeps the largest alone, 1 keeps all."""


@correction(needs=_NEEDS, config=OutlierSequenceConfig)
def outlier_sequence(tokens: LossTokens, config: OutlierSequenceConfig) -> "torch.Tensor":
    """0 at every token of a sequence in which any rho lies outside [low, high], else 1; [n]."""
    rho = probability_ratio(tokens.old_logprobs, tokens.rollout_logprobs)
    outside = (rho < config.low) | (rho > config.high)
    in_sequence = tokens.sequences.sum(outside.to(rho.dtype))
    return tokens.sequences.broadcast((in_sequence == 0).to(rho.dtype))


@correction(needs=_NEEDS, config=TokenMaskConfig)
def token_mask(tokens: LossTokens, config: TokenMaskConfig) -> "torch.Tensor":
    """0 where rho lies outside [low, high], else 1; [n]. The mask of IcePop (Ling team 2025, arXiv:2510.18855), whose range is the default."""
    rho = probability_ratio(tokens.old_logprobs, tokens.rollout_logprobs)
    return ((rho >= config.low) & (rho <= config.high)).to(rho.dtype)


@correction(needs=_NEEDS, config=TisConfig)
def tis(tokens: LossTokens, config: TisConfig) -> "torch.Tensor":
    """Truncated importance sampling, [n]: min(rho, high), or min(product of rho over the sequence, high) at each of its tokens.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", https://fengyao.notion.site/off-policy-rl.
    """
    difference = log_ratio(tokens.old_logprobs, tokens.rollout_logprobs)
    if config.ratio == "sequence":
        difference = tokens.sequences.broadcast(tokens.sequences.sum(difference))
    return difference.exp().clamp(max=config.limit)


@correction(needs=_NEEDS, config=SequenceMaskConfig)
def sequence_mask(tokens: LossTokens, config: SequenceMaskConfig) -> "torch.Tensor":
    """0 at every token of a sequence whose ratio, by `mean`, lies outside [low, high], else 1; [n].

    Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    https://richardli.xyz/rl-collapse.
    """
    difference = log_ratio(tokens.old_logprobs, tokens.rollout_logprobs)
    sequences = tokens.sequences
    ratio = (sequences.mean if config.mean == "geometric" else sequences.sum)(difference).exp()
    low, high = config.bounds
    return sequences.broadcast(((ratio >= low) & (ratio <= high)).to(ratio.dtype))


@correction(needs=lambda config: ("logprobs", config.column, "advantages"), config=OffPolicySequenceMaskConfig)
def off_policy_sequence_mask(tokens: LossTokens, config: OffPolicySequenceMaskConfig) -> "torch.Tensor":
    """0 where A < 0 and the mean over the sequence of log q - log p exceeds `threshold`, with q the anchor, else 1; [n].

    DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, equation 9: mistakes that the policy would hardly make any more teach it nothing. p is
    the policy that is trained, so later steps of a batch drop more.
    """
    difference = tokens.needs[config.column] - tokens.logprobs
    far = tokens.sequences.broadcast(tokens.sequences.mean(difference) > config.threshold)
    return (~(far & (tokens.advantages < 0))).to(difference.dtype)


@correction(needs=("entropy_quantile",), config=TopEntropyConfig)
def top_entropy(tokens: LossTokens, config: TopEntropyConfig) -> "torch.Tensor":
    """1 at the `share` of the batch's tokens with the largest entropy, else 0; [n]: Wang et al. 2025, arXiv:2506.01939.

    `entropy_quantile` is the quantile of a token's entropy among all tokens that carry loss of the whole batch, before its first optimizer
    step; so the selection depends on no micro-batch and no rank.
    """
    # compared in float32, in which the column was written: rounding may not drop the token on the bound
    quantile = tokens.entropy_quantile.float()
    return (quantile >= quantile.new_full((), 1 - config.share)).to(tokens.entropy_quantile.dtype)
