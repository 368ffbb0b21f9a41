"""Sizes that shapes on a CPU are rounded up to, so that none depends on other rows; see `batch_invariance`."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

BUCKET: Final = 16
"""Rows of matrix products come in multiples of this, where one thread computes them in float32."""

FIXED: Final = 64
"""Rows of every other matrix product: with several threads, or in another precision, their number decides the order in which it adds up."""

PLACES: Final = 128
"""Tokens attend to so many places at a time."""

PIECE: Final = 32
"""Tokens of a prompt attend so many at a time: those from a multiple of it on."""

QUERIES: Final = 8
"""Queries of one head of keys come in multiples of this: fewer take as long, and add up in another order than those of pieces."""

LANES: Final = 64
"""No vector loop of torch takes more elements at a time."""

SERIAL_ELEMENTS: Final = 2**15
"""torch gives a thread at least so many elements of an elementwise function (`at::internal::GRAIN_SIZE`)."""


def pad_to_bucket(count: int, device: torch.device, unit: int = BUCKET) -> int:
    """Return the next multiple of `unit` on a CPU, where a row's result must not depend on the number of rows; `count` on other devices."""
    return round_up(count, unit) if device.type == "cpu" else count


def round_up(count: int, unit: int) -> int:
    """Return the next multiple of `unit`."""
    return -(-count // unit) * unit


def find_unit(weight: Tensor) -> int:
    """Return what rows of products with a weight come in multiples of, so that none depends on their number; 1 elsewhere than on a CPU."""
    if weight.device.type != "cpu":
        return 1
    return BUCKET if weight.dtype == torch.float32 and torch.get_num_threads() == 1 else FIXED


def pad_rows(rows: Tensor, unit: int) -> Tensor:
    """Return [m, width], m a multiple of `unit`: the n rows, and zeros after them."""
    missing = -len(rows) % unit
    return pad(rows, (0, 0, 0, missing)) if missing else rows


def apply_in_fixed_rows(function: Callable[[Tensor], Tensor], weight: Tensor, inputs: Tensor) -> Tensor:
    """Return a product of many rows with a weight, in calls of `FIXED` rows where their number matters and they fill such calls."""
    rows = inputs.numel() // inputs.shape[-1]
    if rows <= FIXED or rows % FIXED or find_unit(weight) != FIXED:
        return function(inputs)
    outputs = torch.cat([function(part) for part in torch.split(inputs.reshape(rows, -1), FIXED)])
    return outputs.view(*inputs.shape[:-1], -1)


def apply_aligned(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return an elementwise function of which no element is computed by other instructions than the rest."""
    count = inputs.numel()
    shares = min(torch.get_num_threads(), -(-count // SERIAL_ELEMENTS))
    missing = -count % (LANES * max(1, shares))
    outputs = function(pad(inputs.reshape(-1), (0, missing)) if missing else inputs.contiguous())
    return outputs[:count].view(inputs.shape) if missing else outputs
