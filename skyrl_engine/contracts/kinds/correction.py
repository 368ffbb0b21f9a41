"""Correction: detached per-token factors on the loss, for tokens that another policy sampled. The import of this file needs no torch.

objective = sum over tokens of weight * (factor * token loss of the main loss + sum over further terms of coef * term). Weights, and with
them every denominator, are those of the whole batch: a dropped token (factor 0) is not taken out of the count.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attrs import define

from skyrl_engine.contracts.kinds.loss import LossTokens

if TYPE_CHECKING:
    import torch


class Correction(Protocol):
    """The product of `skyrl_engine_make_correction`. `needs` names model scores and data columns, as a loss's does."""

    needs: tuple[str, ...]

    def __call__(self, tokens: LossTokens) -> "torch.Tensor":
        """[n] finite factors >= 0 of the n tokens' losses, 0 to drop a token.

        `tokens` are those that the corrections before left over, and sequences are what is left of them; nothing is differentiable.
        """


@define
class FunctionCorrection:
    """A correction made of a plain function and its config; the product of the `correction` decorator."""

    name: str
    function: Callable[..., "torch.Tensor"]
    config: object
    needs: tuple[str, ...]

    def __call__(self, tokens: LossTokens) -> "torch.Tensor":
        return self.function(tokens, self.config)
