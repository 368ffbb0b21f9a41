"""Weights on their way to generators, in the precision that generators compute in: that of the run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_engine.contracts.kinds.backend import Backend, RoundsWeights, iterate_named_tensors
from skyrl_engine.contracts.values.model import ComputeDtype

if TYPE_CHECKING:
    import torch


def iterate_wire_weights(label: str, backend: Backend, dtype: ComputeDtype) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield full weights one at a time, as `Backend.weights` does; every rank iterates. Of a bfloat16 run they are rounded to that.

    A backend that can rounds them on the ranks that hold them, so that half as much is gathered. Raises ResultError for anything but named
    tensors.
    """
    if dtype != "bfloat16":
        yield from iterate_named_tensors(label, "weights", backend.weights())
        return
    import torch

    rounded = isinstance(backend, RoundsWeights)
    weights = backend.weights_in(torch.bfloat16) if isinstance(backend, RoundsWeights) else backend.weights()
    for name, weight in iterate_named_tensors(label, "weights_in" if rounded else "weights", weights):
        yield name, weight.detach().to(torch.bfloat16) if weight.is_floating_point() else weight
