"""Alternatives to clipping that keep a token near the policy that sampled it: a mask by divergence, a soft gate of the ratio."""

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, in_

from skyrl_engine import LossOutput, LossTokens, loss
from skyrl_engine_losses.ratio import AnchoredConfig, approximate_kl, fraction, probability_ratio

if TYPE_CHECKING:
    import torch


@frozen
class DppoConfig(AnchoredConfig):
    """The distance that a token's probability may move, and the policy that it is measured from."""

    kind: Literal["tv", "kl"] = field(default="tv", validator=in_(("tv", "kl")))
    """Divergence of the two outcomes "this token" and "any other": `tv`, the absolute difference of the token's probabilities, or `kl`, in
    nats."""

    delta_low: float = field(default=0.2, validator=ge(0.0))
    """Divergence beyond which a token of negative advantage that became less probable is masked."""

    delta_high: float = field(default=0.2, validator=ge(0.0))
    """Divergence beyond which a token of positive advantage that became more probable is masked."""


@frozen
class SapoConfig:
    """The sharpness of the gate for either sign of the advantage."""

    tau_pos: float = field(default=1.0, validator=gt(0.0))
    """Temperature of the gate where the advantage is positive."""

    tau_neg: float = field(default=1.05, validator=gt(0.0))
    """Temperature of the gate where the advantage is 0 or negative. A larger temperature closes the gate at a smaller distance from ratio 1."""


@loss(needs=lambda config: ("logprobs", config.column, "advantages"), config=DppoConfig, homogeneous=True)
def dppo(tokens: LossTokens, config: DppoConfig) -> LossOutput:
    """-r A M, [n], with r the ratio p / mu to the anchor: Qi et al. 2026, arXiv:2602.04879, binary approximations.

    M is 0 where A > 0, p > mu and the divergence exceeds delta_high, and where A < 0, p < mu and it exceeds delta_low; else 1.
    """
    anchor, advantages = tokens.needs[config.column], tokens.advantages
    logprobs = tokens.logprobs.detach()
    moved = logprobs.exp() - anchor.exp()
    divergence = moved.abs() if config.kind == "tv" else _binary_kl(anchor, logprobs)
    masked = (advantages > 0) & (moved > 0) & (divergence > config.delta_high)
    masked |= (advantages < 0) & (moved < 0) & (divergence > config.delta_low)
    ratio = probability_ratio(tokens.logprobs, anchor)
    return LossOutput(
        (-ratio * advantages).masked_fill(masked, 0.0),
        {"clip_fraction": fraction(masked), "approximate_kl": approximate_kl(tokens.logprobs, anchor)},
    )


def _binary_kl(anchor: "torch.Tensor", logprobs: "torch.Tensor") -> "torch.Tensor":
    """[n] nats: mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p)), of "this token or another" under both policies."""
    complement, complement_now = -anchor.clamp(max=0.0).expm1(), -logprobs.clamp(max=0.0).expm1()
    return anchor.exp() * (anchor - logprobs) + complement.xlogy(complement) - complement.xlogy(complement_now)


@loss(needs=("logprobs", "old_logprobs", "advantages"), config=SapoConfig, homogeneous=True)
def sapo(tokens: LossTokens, config: SapoConfig) -> LossOutput:
    """-A (4 / tau) sigmoid(tau (r - 1)), [n]: Qwen 2025, arXiv:2511.20347; tau = tau_pos where A > 0, else tau_neg.

    At r = 1 the gate's slope is 1, that of the plain ratio; away from it the slope falls smoothly to 0.
    """
    ratio = probability_ratio(tokens.logprobs, tokens.old_logprobs)
    advantages = tokens.advantages
    temperature = advantages.new_full((), config.tau_pos).where(advantages > 0, config.tau_neg)
    gate = (temperature * (ratio - 1)).sigmoid() * (4 / temperature)
    return LossOutput(-advantages * gate, {"approximate_kl": approximate_kl(tokens.logprobs, tokens.old_logprobs)})
