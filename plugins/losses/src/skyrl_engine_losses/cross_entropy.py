"""Maximum likelihood, plain and smoothed."""

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, lt

from skyrl_engine import LossOutput, LossTokens, Metric, loss

if TYPE_CHECKING:
    import torch


@loss(needs=("logprobs",))
def cross_entropy(tokens: LossTokens, _config: None) -> "torch.Tensor":
    """The negative log-likelihood of the target token, [n] in nats: -log p(token | what came before)."""
    return -tokens.logprobs


@frozen
class LabelSmoothingConfig:
    """Share of the target that goes to the whole vocabulary."""

    smoothing: float = field(default=0.1, validator=[ge(0), lt(1)])
    """Probability that the target spreads evenly over the whole vocabulary."""


@loss(needs=("logprobs", "mean_logprob"), config=LabelSmoothingConfig)
def label_smoothing(tokens: LossTokens, config: LabelSmoothingConfig) -> LossOutput:
    """The cross-entropy with a smoothed target, [n] in nats: (1 - s) (-log p(token)) + s (-mean of log p over the vocabulary).

    Szegedy et al. 2016, https://arxiv.org/abs/1512.00567, section 7; the metric `cross_entropy` is that of the token alone.
    """
    plain, even = -tokens.logprobs, -tokens.mean_logprob
    smoothed = (1 - config.smoothing) * plain + config.smoothing * even
    return LossOutput(smoothed, {"cross_entropy": Metric.mean(plain.detach().sum(), len(plain))})
