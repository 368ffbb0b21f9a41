"""The sum of squares from which backends compute the norm of a gradient, and the factor that clips it."""

from collections.abc import Iterable

import torch
from torch import Tensor

_AT_ONCE = 2**22
"""Elements that are copied to float64 at a time: 32 MiB."""


@torch.no_grad()
def sum_of_squares(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, float64[] on `device`.

    Squares and sums are in float64. A sum in float32 is off by 1e-4 at 1e8 elements, and by another amount for every way to divide them among
    ranks; float64 sums of float32 values differ by about 1e-15 at most, so the norm, and with it the clipped step, does not depend on the
    division. The square of every finite float32 is finite in float64.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        for piece in torch.split(part.detach().reshape(-1), _AT_ONCE):
            wide = piece.to(torch.float64)
            total += torch.dot(wide, wide).to(device)
    return total


def clipping_factor(norm: float, max_norm: float | None) -> float | None:
    """Return the factor by which gradients of this 2-norm are multiplied so that it is at most `max_norm`; None: they stay as they are.

    1e-6 is the constant of `torch.nn.utils.clip_grad_norm_`. A norm that is not finite scales nothing.
    """
    return max_norm / (norm + 1e-6) if max_norm is not None and max_norm < norm < float("inf") else None
