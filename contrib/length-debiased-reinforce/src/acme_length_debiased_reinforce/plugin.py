"""The loss `length_debiased_reinforce`. It uses tensor methods alone, so this module imports no torch."""

from attrs import define, field
from attrs.validators import ge, gt, le

from skyrl_engine import LossOutput, LossTokens, Metric, loss


@define
class LengthDebiasedConfig:
    power: float = field(default=0.5, validator=[ge(0.0), le(1.0)])
    """Exponent of the length in a response's weight (reference_length / length) ** power. 0: every token counts alike; 1: every response."""

    reference_length: float = field(default=512.0, validator=gt(0.0))
    """The response length, in tokens, at which the weight is 1. It sets the scale of the loss and nothing else."""


@loss(
    needs=("logprobs", "advantages"),
    config=LengthDebiasedConfig,
    advised_reducers=("sequence_mean_token_sum_norm", "token_mean", "sum"),
    homogeneous=True,
)
def length_debiased_reinforce(tokens: LossTokens, config: LengthDebiasedConfig) -> LossOutput:
    """REINFORCE weighted by length, [n]: -(L0 / L)^power A log p, with L the number of loss-carrying tokens of the token's sequence.

    The gradient of a sequence's log-probability is a sum over its tokens, so its variance grows with their number L. He et al. 2025
    (arXiv:2509.07558) therefore weight sequences by L^-power, divided by the batch's sum of such weights. Here the reducer normalises and
    L0 = `reference_length` sets the scale, so that the loss of a token does not depend on the rest of the batch.
    """
    sequences = tokens.sequences
    lengths = sequences.counts.clamp(min=1).to(tokens.logprobs.dtype)
    weight = (config.reference_length / lengths) ** config.power
    per_sequence = Metric.mean((weight * (sequences.counts > 0)).sum(), (sequences.counts > 0).sum())
    return LossOutput(-sequences.broadcast(weight) * tokens.advantages * tokens.logprobs, {"length_weight": per_sequence})
