"""Memory of devices that is given back, and an optimizer's state on its way to host memory and back."""

import torch
from torch import Tensor
from torch.optim import Optimizer

Moved = tuple[tuple[Tensor, str], ...]
"""Parameters and names of their optimizer's values that were moved."""


def release_cached_memory(device: torch.device | str) -> None:
    """Give memory that is free in this process back to its device, where others can take it."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def move_optimizer_state(optimizer: Optimizer | None, device: torch.device) -> Moved:
    """Move what an optimizer holds on `device` to host memory; returns what was moved."""
    moved = []
    for parameter, values in ({} if optimizer is None else optimizer.state).items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type == device.type:
                values[name] = value.to("cpu")
                moved.append((parameter, name))
    return tuple(moved)


def move_back(optimizer: Optimizer | None, moved: Moved, device: torch.device) -> None:
    """Move these values back to the device."""
    for parameter, name in moved:
        assert optimizer is not None, "values were moved of an optimizer"
        optimizer.state[parameter][name] = optimizer.state[parameter][name].to(device)
