"""Mix the weights of one exported model into another's."""

from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.weight_files import safetensors_header

_REMEDY: Final = "Set reference.mixup = 1, or take a reference of the trained model's architecture"


def mix_weights(directory: Path, other: Path, *, share: float) -> None:
    """Write `share` of the weights in `directory` plus 1 - `share` of those in `other` into the files of `directory`, in float32 (or float64).

    Tensors that `other` lacks, as an export keeps them of its source, and those that are no floating-point numbers, stay. One file is in memory
    at a time. Raises ModelError where `other` holds a tensor that `directory` lacks, or has with another shape.
    """
    holders = {
        name: file for file in sorted(other.glob("*.safetensors")) for name in safetensors_header(file) if name != "__metadata__"
    }
    own = {name for file in directory.glob("*.safetensors") for name in safetensors_header(file)}
    if lost := sorted(holders.keys() - own):
        raise ModelError(
            f"the reference has the tensor {lost[0]}, which the trained model lacks ({len(lost)} such tensors)", remedy=_REMEDY
        )
    for path in sorted(directory.glob("*.safetensors")):
        mixed = {}
        for name, tensor in load_file(path).items():
            if name not in holders or not tensor.is_floating_point():
                mixed[name] = tensor
                continue
            with safe_open(holders[name], "pt") as file:
                before = file.get_tensor(name)
            if before.shape != tensor.shape:
                raise ModelError(
                    f"{name} has the shape {list(tensor.shape)} in the trained model and {list(before.shape)} in its reference",
                    remedy=_REMEDY,
                )
            dtype = torch.promote_types(torch.promote_types(tensor.dtype, before.dtype), torch.float32)
            mixed[name] = before.to(dtype).mul_(1 - share).add_(tensor.to(dtype), alpha=share)
        save_file(mixed, path, metadata={"format": "pt"})
