"""The loss `focal`."""

from attrs import define

from skyrl_engine import loss


@define
class FocalConfig:
    gamma: float = 2.0


@loss(needs=("logprobs",), config=FocalConfig)
def focal(tokens, config):
    """Focal cross-entropy (Lin et al. 2017, eq. 4), float32[n]."""
    miss = 1 - tokens.logprobs.exp()
    return -(miss**config.gamma) * tokens.logprobs
