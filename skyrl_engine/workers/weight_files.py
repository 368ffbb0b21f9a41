"""Weights on their way from the ranks to generators in other processes: safetensors files in a folder, written once per version."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from skyrl_engine.contracts.kinds.generator import WeightForm
from skyrl_engine.errors import ModelError

if TYPE_CHECKING:
    import torch

SHARD_BYTES: Final = 2**30
"""Bytes of tensors after which a file is written, so that no rank holds a second copy of a whole model."""

INDEX: Final = "model.safetensors.index.json"


def write_weights(
    directory: Path, weights: "Iterator[tuple[str, torch.Tensor]]", *, writes: bool = True, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write named tensors into safetensors files in an existing directory, and their index, as Hugging Face lays out a sharded model.

    A file is full with `shard_bytes` of tensors. A rank with `writes` False takes part in gathering and writes nothing. Raises ModelError where
    the files cannot be written.
    """
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = size = 0
    for name, tensor in weights:
        if not writes:
            continue
        # a copy: the backend may show its own memory, and tied tensors share theirs, which a file cannot
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += shard[name].nbytes
        if size >= shard_bytes:
            total += _write_shard(directory, shard, places)
            shard, size = {}, 0
    if not writes:
        return
    if shard:
        total += _write_shard(directory, shard, places)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _write_shard(directory: Path, shard: "dict[str, torch.Tensor]", places: dict[str, str]) -> int:
    """Write a file, note in `places` which tensors it holds, and return how many bytes they take."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
    try:
        save_file(shard, directory / file, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the weights for the generators cannot be written to {directory} ({error})",
            remedy="Free space there: it takes one copy of the model per version that is under way",
        ) from error
    places.update(dict.fromkeys(shard, file))
    return sum(tensor.nbytes for tensor in shard.values())


@frozen
class WrittenWeights:
    """The `WeightSource` of a folder that `write_weights` filled, or of a PEFT folder of adapters; of neither, it offers nothing."""

    folder: Path | None
    adapters: Path | None

    @property
    def forms(self) -> frozenset[WeightForm]:
        if self.adapters is not None:
            return frozenset({"adapter"})
        return frozenset() if self.folder is None else frozenset({"tensors", "directory"})

    @property
    def path(self) -> Path:
        """The folder of either."""
        path = self.folder or self.adapters
        assert path is not None, "nothing was written"
        return path

    def storage(self) -> "dict[str, torch.Tensor]":
        raise AssertionError("the memory of weights was asked for that lie in files")

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield the tensors of the files, one at a time, in the order in which they were written."""
        from safetensors import safe_open

        folder = self.directory()
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        for file in dict.fromkeys(places.values()):
            with safe_open(folder / file, framework="pt") as tensors:
                for name in (name for name, place in places.items() if place == file):
                    yield name, tensors.get_tensor(name)

    def directory(self) -> Path:
        assert self.folder is not None, "whole weights were asked for where adapters alone were written"
        return self.folder

    def adapter(self) -> Path:
        assert self.adapters is not None, "adapters were asked for of whole weights"
        return self.adapters
