"""Losses whose ratio belongs to the sequence: the geometric mean of its tokens' ratios. Meant for the reducer `sequence_mean`."""

from attrs import field, frozen
from attrs.validators import ge

from skyrl_engine import LossOutput, LossTokens, loss
from skyrl_engine_losses.clipping import ClipConfig, clip_policy_loss
from skyrl_engine_losses.ratio import LOG_RATIO_LIMIT, approximate_kl, fraction

_NEEDS = ("logprobs", "old_logprobs", "advantages")
_LOG_LIMIT = 10.0
"""Upper limit of the logarithm of GSPO's sequence ratio, in nats."""


@frozen
class LogClipConfig:
    """The clipping range of a token's log-ratio."""

    clip_low: float = field(default=0.4, validator=ge(0.0))
    """The log-ratio is clipped at -`clip_low` nats from below, the ratio at exp(-`clip_low`)."""

    clip_high: float = field(default=0.4, validator=ge(0.0))
    """The log-ratio is clipped at `clip_high` nats from above, the ratio at exp(`clip_high`)."""


@loss(needs=_NEEDS, config=ClipConfig, advised_reducers=("sequence_mean",), homogeneous=True)
def gspo(tokens: LossTokens, config: ClipConfig) -> LossOutput:
    """`ppo` with the sequence's ratio s at each token, [n]: Zheng et al. 2025, arXiv:2507.18071, the variant GSPO-token.

    s = exp(min(log p - sg(log p) + sg(mean over the sequence of log p - log old), 10)): its value is the sequence's, its gradient the
    token's own, so that advantages may differ within a sequence.
    """
    logprobs, sequences = tokens.logprobs, tokens.sequences
    difference = (logprobs - tokens.old_logprobs).detach()
    of_sequence = sequences.broadcast(sequences.mean(difference))
    ratio = (logprobs - logprobs.detach() + of_sequence).clamp(max=_LOG_LIMIT).exp()
    token_loss, clipped = clip_policy_loss(ratio, tokens.advantages, config)
    return LossOutput(
        token_loss, {"clip_fraction": fraction(clipped), "approximate_kl": approximate_kl(logprobs, tokens.old_logprobs)}
    )


@loss(needs=_NEEDS, config=LogClipConfig, advised_reducers=("sequence_mean",), homogeneous=True)
def gmpo(tokens: LossTokens, config: LogClipConfig) -> LossOutput:
    """-A exp(mean over the sequence of c), [n], with c the token's log-ratio clipped on the side to which A pulls it.

    Zhao et al. 2025, arXiv:2507.20673: c = s min(s d, s clamp(d, -clip_low, clip_high)), d = log p - log old, s = sign A; the objective is the
    geometric mean of clipped ratios times A, one value per sequence, here repeated at its tokens. The mean is clamped at 20 nats from above,
    because nothing else bounds it where A < 0.
    """
    advantages, sequences = tokens.advantages, tokens.sequences
    sign = advantages.sign()
    difference = tokens.logprobs - tokens.old_logprobs
    plain = sign * difference
    clipped = sign * difference.clamp(-config.clip_low, config.clip_high)
    of_sequence = sequences.mean(sign * plain.minimum(clipped)).clamp(max=LOG_RATIO_LIMIT).exp()
    return LossOutput(
        -advantages * sequences.broadcast(of_sequence),
        {
            "clip_fraction": fraction(clipped.detach() < plain.detach()),
            "approximate_kl": approximate_kl(tokens.logprobs, tokens.old_logprobs),
        },
    )
