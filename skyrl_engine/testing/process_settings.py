"""Settings shared by everything in a process: torch's settings, and the environment variables that give its rank."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from skyrl_engine.testing.promise import Broken

ANOTHER_RANK = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "CUDA_VISIBLE_DEVICES": "1",
}
"""The environment of a rank that is not the first, as launchers set it."""


_SETTERS: Mapping[str, Callable[[Any], object]] = {
    "gradient mode": torch.set_grad_enabled,
    "default dtype": torch.set_default_dtype,
    "number of threads": torch.set_num_threads,
    "deterministic algorithms": torch.use_deterministic_algorithms,
    "flushing of denormal numbers": torch.set_flush_denormal,
}


def torch_settings() -> Mapping[str, Any]:
    """Return by name the settings of torch that hold for the whole process."""
    denormal = torch.tensor([1e-310], dtype=torch.float64)
    return {
        "gradient mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "flushing of denormal numbers": not (denormal * 1).any(),
    }


@contextmanager
def settings_left_alone() -> Iterator[None]:
    """Restore torch's settings in the end, and raise Broken where one had changed."""
    before = torch_settings()
    yield
    changed = {name: value for name, value in torch_settings().items() if value != before[name]}
    for name in changed:
        _SETTERS[name](before[name])
    for name, value in changed.items():
        raise Broken(
            f"leaves the {name} at {value}, where it was {before[name]}",
            "Change settings of the process in a with statement, or not at all",
        )


@contextmanager
def another_rank() -> Iterator[None]:
    """Set the environment of another rank, and restore it afterwards."""
    before = {name: os.environ.get(name) for name in ANOTHER_RANK}
    os.environ.update(ANOTHER_RANK)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
