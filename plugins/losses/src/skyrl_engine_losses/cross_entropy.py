"""Maximum likelihood."""

from typing import TYPE_CHECKING

from skyrl_engine import LossTokens, loss

if TYPE_CHECKING:
    import torch


@loss(needs=("logprobs",))
def cross_entropy(tokens: LossTokens, _config: None) -> "torch.Tensor":
    """The negative log-likelihood of the target token, [n] in nats: -log p(token | what came before)."""
    return -tokens.logprobs
