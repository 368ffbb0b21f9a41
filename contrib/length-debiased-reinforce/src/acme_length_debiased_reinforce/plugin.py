"""The loss `length_debiased_reinforce`. Tensor methods alone, so this module imports no torch."""

from attrs import define, field
from attrs.validators import ge, gt, le

from skyrl_engine import LossOutput, LossTokens, Metric, loss


@define
class LengthDebiasedConfig:
    power: float = field(default=0.5, validator=[ge(0.0), le(1.0)])
    """How strongly long responses are held back. 0: every token counts alike; 1: every response does."""

    reference_length: float = field(default=512.0, validator=gt(0.0))
    """The response length, in tokens, whose loss stays as it is; it sets the scale and nothing else."""


@loss(
    needs=("logprobs", "advantages"),
    config=LengthDebiasedConfig,
    advised_reducers=("sequence_mean_token_sum_norm", "token_mean", "sum"),
    homogeneous=True,
)
def length_debiased_reinforce(tokens: LossTokens, config: LengthDebiasedConfig) -> LossOutput:
    """REINFORCE with a weight by length, [n]: -(L0 / L)^power A lp, L the loss-carrying tokens of the token's own sequence.

    The gradient of a sequence's log-probability is a sum over its tokens, and its variance grows with their number L. He et al. 2025
    (arXiv:2509.07558) weigh sequences by L^-power for that; their division by the batch's sum of such weights is left to the
    reducer, and L0 keeps the scale in its place, so that nothing here depends on what else is in the batch.
    """
    sequences = tokens.sequences
    lengths = sequences.counts.clamp(min=1).to(tokens.logprobs.dtype)
    weight = (config.reference_length / lengths) ** config.power
    per_sequence = Metric.mean((weight * (sequences.counts > 0)).sum().item(), (sequences.counts > 0).sum().item())
    return LossOutput(-sequences.broadcast(weight) * tokens.advantages * tokens.logprobs, {"length_weight": per_sequence})
