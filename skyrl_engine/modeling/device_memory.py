"""Memory of devices: its highest point, what is given back, and an optimizer's state on its way to host memory and back."""

from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

Moved = tuple[tuple[Tensor, str], ...]
"""Parameters and names of their optimizer's values that were moved."""


PROCESS = Path("/proc/self")


def take_peak_bytes(device: torch.device | str) -> int | None:
    """Return the most bytes that tensors took on a CUDA device since the last call, or that this process took where it computes on CPUs.

    None where the system does not say; where it does not let the highest point be forgotten, the number is that since the process started.
    """
    if torch.device(device).type == "cuda":
        highest = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return highest
    try:
        lines = (PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    with suppress(OSError):
        (PROCESS / "clear_refs").write_text("5", encoding="ascii")  # proc_pid_clear_refs(5): forget the highest resident set
    return None if kibibytes is None else 1024 * int(kibibytes)


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
