"""Estimators of KL(q || p) at one token, of d = log q - log p: Schulman 2020, http://joschu.net/blog/kl-approx.html."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from skyrl_engine_losses.ratio import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    import torch

Estimator = Literal["k1", "abs", "k2", "k3"]

K3_LIMIT = 10.0
"""Limit of the estimator k3 in nats, on either side: verl's."""


def _k1(difference: "torch.Tensor") -> "torch.Tensor":
    return difference


def _abs(difference: "torch.Tensor") -> "torch.Tensor":
    return difference.abs()


def _k2(difference: "torch.Tensor") -> "torch.Tensor":
    return difference.square() / 2


def _k3(difference: "torch.Tensor") -> "torch.Tensor":
    inverse_ratio = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return inverse_ratio + difference - 1


_ESTIMATORS: "Mapping[Estimator, Callable[[torch.Tensor], torch.Tensor]]" = {"k1": _k1, "abs": _abs, "k2": _k2, "k3": _k3}


def estimate_kl(estimator: Estimator, difference: "torch.Tensor", *, limit: float | None = K3_LIMIT) -> "torch.Tensor":
    """Estimate the divergence at each token, [n] in nats, from d [n].

    `k3` clamps its exponent to +-20 and, unless it is None, its value to +-`limit`; beyond these limits its gradient is 0.
    """
    estimate = _ESTIMATORS[estimator](difference)
    return estimate.clamp(-limit, limit) if estimator == "k3" and limit is not None else estimate
