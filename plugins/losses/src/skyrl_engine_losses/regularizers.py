"""Terms to add to a loss: closeness to a reference model, entropy, and small normalisers."""

from typing import cast, get_args

from attrs import field, frozen
from attrs.validators import gt, in_, optional

from skyrl_engine import LossOutput, LossTokens, Metric, loss
from skyrl_engine_losses.estimators import K3_LIMIT, Estimator, estimate_kl
from skyrl_engine_losses.ratio import probability_ratio


@frozen
class KlConfig:
    """The estimator of the divergence at one token."""

    estimator: Estimator = field(default="k3", validator=in_(get_args(Estimator)))
    """With d = log p - log ref: `k1` is d, `abs` |d|, `k2` d^2 / 2 and `k3` exp(-d) + d - 1, which is never negative."""

    corrected: bool = False
    """Multiply by the ratio p / old: the estimate is then of the policy that is trained, though the old one sampled, and `k3` has the gradient
    of the divergence."""

    limit: float | None = field(default=cast("float | None", K3_LIMIT), validator=optional(gt(0.0)))
    """Largest value of `k3` in nats, before `corrected` multiplies it, beyond which it has no gradient, as in verl; none: no limit, as TRL."""


def _needs_of_kl(config: KlConfig) -> tuple[str, ...]:
    return ("logprobs", *(("old_logprobs",) if config.corrected else ()), "ref_logprobs")


@loss(needs=_needs_of_kl, config=KlConfig)
def kl(tokens: LossTokens, config: KlConfig) -> LossOutput:
    """An estimate of KL(policy || reference) at each token, [n] in nats: Schulman 2020, http://joschu.net/blog/kl-approx.html.

    `k3` clamps its exponent to +-20 and its value to +-`limit`; beyond these limits its gradient is 0. With `corrected` it is times p / old,
    both differentiated: DeepSeek-AI 2025, arXiv:2512.02556, section 3.1.
    """
    estimate = estimate_kl(config.estimator, tokens.logprobs - tokens.ref_logprobs, limit=config.limit)
    if config.corrected:
        estimate = estimate * probability_ratio(tokens.logprobs, tokens.old_logprobs)
    return LossOutput(estimate, {"reference_kl": Metric.mean(estimate.detach().sum(), len(estimate))})


@loss(needs=("entropy",))
def entropy(tokens: LossTokens, _config: None) -> LossOutput:
    """-H, [n] in nats: with a positive coefficient, training raises the entropy of the next-token distribution."""
    return LossOutput(-tokens.entropy, {"entropy": Metric.mean(tokens.entropy.detach().sum(), len(tokens.entropy))})


@loss(needs=("logsumexp",))
def z_loss(tokens: LossTokens, _config: None) -> LossOutput:
    """log^2 Z, [n], with Z the normaliser of softmax: keeps logits from drifting.

    Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5.
    """
    normaliser = tokens.logsumexp
    return LossOutput(normaliser.square(), {"logsumexp": Metric.mean(normaliser.detach().sum(), len(normaliser))})
