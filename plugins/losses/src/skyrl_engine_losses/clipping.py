"""Proximal policy optimization: a token's loss gains nothing when the ratio moves beyond its clipping range."""

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt, le

from skyrl_engine import LossOutput, LossTokens, loss
from skyrl_engine_losses.ratio import approximate_kl, fraction, probability_ratio

if TYPE_CHECKING:
    import torch


@frozen
class ClipConfig:
    """The clipping range of the ratio."""

    clip_low: float = field(default=0.2, validator=[ge(0.0), le(1.0)])
    """The ratio is clipped at 1 - `clip_low` from below."""

    clip_high: float = field(default=0.2, validator=ge(0.0))
    """The ratio is clipped at 1 + `clip_high` from above."""


@frozen
class DualClipConfig(ClipConfig):
    """The clipping range of the ratio, and the bound of the loss where the advantage is negative."""

    dual_clip: float = field(default=3.0, validator=gt(1.0))
    """The loss is at most `dual_clip` times |A| where the advantage A is negative."""


def clip_policy_loss(
    ratio: "torch.Tensor", advantages: "torch.Tensor", config: ClipConfig
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), [n], and bool [n] of the tokens where clipping took effect."""
    plain = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return -plain.minimum(clipped), clipped.detach() < plain.detach()


@loss(needs=("logprobs", "old_logprobs", "advantages"), config=ClipConfig, homogeneous=True)
def ppo(tokens: LossTokens, config: ClipConfig) -> LossOutput:
    """-min(r A, clip(r) A), [n], with r the ratio to the old policy: Schulman et al. 2017, arXiv:1707.06347, equation 7."""
    ratio = probability_ratio(tokens.logprobs, tokens.old_logprobs)
    token_loss, clipped = clip_policy_loss(ratio, tokens.advantages, config)
    return LossOutput(
        token_loss,
        {"clip_fraction": fraction(clipped), "approximate_kl": approximate_kl(tokens.logprobs, tokens.old_logprobs)},
    )


@loss(needs=("logprobs", "old_logprobs", "advantages"), config=DualClipConfig, homogeneous=True)
def ppo_dual_clip(tokens: LossTokens, config: DualClipConfig) -> LossOutput:
    """`ppo`, and where A < 0 at most -dual_clip A, [n]: Ye et al. 2020, arXiv:1912.09729.

    Without the bound, a token of negative advantage whose ratio exploded has a loss, and a gradient, as large as the ratio.
    """
    ratio = probability_ratio(tokens.logprobs, tokens.old_logprobs)
    advantages = tokens.advantages
    single, clipped = clip_policy_loss(ratio, advantages, config)
    bound = -config.dual_clip * advantages
    negative = advantages < 0
    return LossOutput(
        single.minimum(bound).where(negative, single),
        {
            "clip_fraction": fraction(clipped),
            "dual_clip_fraction": fraction(negative & (single.detach() > bound)),
            "approximate_kl": approximate_kl(tokens.logprobs, tokens.old_logprobs),
        },
    )
