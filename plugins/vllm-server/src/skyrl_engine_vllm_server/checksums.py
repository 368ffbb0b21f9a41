"""Checksums of tensors, and which tensors a model's loaders have taken. Needs torch alone.

`checksum_of` is that of `skyrl_engine_vllm.checksums`: two sums, of a tensor's words and of words times their places, in integers of 64 bits
that wrap around. So they are the same on every device and in every order of addition, and tell exchanged words. They are against accidents,
not against attackers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

CHUNK = 1 << 22
"""Words that are summed at once: each becomes an integer of 64 bits."""


def checksum_of(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's bytes, shape and dtype."""
    data = tensor.detach().contiguous()
    words = data.view(-1).view(
        torch.int32 if data.element_size() % 4 == 0 else torch.int16 if data.element_size() == 2 else torch.uint8
    )
    plain, placed = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
        plain += part.sum().cpu()
        placed += (part * (places * 2654435761 + 1)).sum().cpu()
    mask = (1 << 64) - 1
    return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}:{int(plain) & mask:016x}{int(placed) & mask:016x}"


class LoadedTensors:
    """A record of what loaders of a model took: per received tensor, how many of its numbers, and if they were the received ones."""

    def __init__(self) -> None:
        self.received: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._held: list[torch.Tensor] = []
        self._taken: dict[str, int] = {}
        self._whole: dict[str, torch.Tensor] = {}

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor that came; it is held until `finish`, so that its memory is no other tensor's."""
        self.received[name] = checksum_of(tensor)
        self._sizes[name] = tensor.numel()
        self._names[tensor.untyped_storage().data_ptr()] = name
        self._whole[name] = tensor
        self._held.append(tensor)

    def record(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """Return the loader of a parameter, which notes what it is given."""

        def load(*arguments: Any, **keywords: Any) -> Any:
            result = loader(*arguments, **keywords)
            for given in (*arguments[1:], *keywords.values()):
                if isinstance(given, torch.Tensor) and (name := self._names.get(given.untyped_storage().data_ptr())) is not None:
                    self._taken[name] = self._taken.get(name, 0) + given.numel()
            return result

        load.__name__ = getattr(loader, "__name__", "load")
        return load

    def finish(self) -> Mapping[str, str]:
        """Return checksums of the tensors that loaders took whole, as these are after loading, and let go of all."""
        taken = {name: checksum_of(tensor) for name, tensor in self._whole.items() if self._taken.get(name, 0) >= self._sizes[name]}
        self._names.clear()
        self._held.clear()
        self._whole.clear()
        return taken
