"""The bytes of the tensors that a process holds."""

import gc
from collections.abc import Iterable, Iterator

import torch
from torch._subclasses import FakeTensor


def count_live_bytes() -> int:
    """Count the bytes of all tensors of this process on the CPU, each memory once."""
    # what a process has frozen is not listed
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    total = count_bytes(_list_tensors())
    if is_frozen:
        gc.freeze()
    return total


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes on the CPU that these tensors lie in, each memory once."""
    found = {}
    for tensor in tensors:
        for part in _list_parts(tensor):
            found.update(_measure_memory(part))
    return sum(found.values())


def _list_tensors() -> Iterator[torch.Tensor]:
    for held in gc.get_objects():
        # not `isinstance`, which asks proxies for their class
        if issubclass(type(held), torch.Tensor):
            yield held
            # which Python has no object of before somebody asks for it
            if held.is_leaf and held.grad is not None:
                yield held.grad


def _list_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """List the tensors that one is made of: those that it wraps, those of a sparse one, or itself."""
    if flatten := getattr(tensor, "__tensor_flatten__", None):
        names, _ = flatten()
        # a name may be of something else, such as a mesh of ranks
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, torch.Tensor):
                yield from _list_parts(part)
    elif tensor.layout is torch.sparse_coo:
        # its public `indices` and `values` are of coalesced ones only, and to coalesce would make new memory
        yield from (tensor._indices(), tensor._values())  # noqa: SLF001
    else:
        yield tensor


def _measure_memory(tensor: torch.Tensor) -> dict[int, int]:
    """Measure the bytes on the CPU that a tensor lies in, by their address; nothing for one that has no memory of its own."""
    if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
        return {}
    try:
        storage = tensor.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    except (RuntimeError, ValueError):
        # a wrapper that does not say what it wraps (which is listed for itself), one that torch traces with, one without a size yet
        return {}
