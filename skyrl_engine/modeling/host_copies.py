"""Copies of tensors in host memory, for what reads them while the tensors change."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CopyTensor = Callable[[str, Tensor], Tensor]
"""Copy a tensor to host memory; the name is its own among those that are copied together."""


def copy_to_host(_: str, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor [...] on the CPU, in memory of its own."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


class HostCopies:
    """Copies of the same tensors time after time, in memory that stays: getting it costs more than copying into it.

    Memory for tensors of a CUDA device is pinned, which makes such copies several times as fast. Of a DTensor this rank's part is copied.
    """

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor [...] into the memory of this name; a copy from a CUDA device is there once `wait` returned."""
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            # by its constructor: from_local would move the copy to the device of the mesh
            local = self.copy(name, tensor.to_local())
            return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call] # noqa: SLF001 - its whole layout
        place = self._places.get(name)
        if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
            place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._places[name] = place
        return place.copy_(tensor, non_blocking=True)

    def wait(self, device: torch.device) -> None:
        """Wait until the copies of tensors of this device are there."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def copy_all(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Copy a dictionary of tensors by their names."""
        return {name: self.copy(name, tensor) for name, tensor in tensors.items()}
