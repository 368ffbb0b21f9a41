"""Settings shared by everything in a process, and what differs between processes: the rank's environment variables, and hashes of texts."""

import builtins
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
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


def _set_filters(filters: Any) -> None:
    warnings.filters[:] = filters  # type: ignore[index]  # a list, which the type hides
    with warnings.catch_warnings():
        pass  # leaving this block makes Python forget what it remembers of older filters


def _set_environment(variables: Any) -> None:
    os.environ.clear()
    os.environ.update(variables)


_SETTERS: Mapping[str, Callable[[Any], object]] = {
    "gradient mode": torch.set_grad_enabled,
    "default dtype": torch.set_default_dtype,
    "number of threads": torch.set_num_threads,
    "deterministic algorithms": torch.use_deterministic_algorithms,
    "flushing of denormal numbers": torch.set_flush_denormal,
    "precision of matrix products": torch.set_float32_matmul_precision,
    "anomaly mode": torch.autograd.set_detect_anomaly,
    "default device": torch.set_default_device,
    "filters of warnings": _set_filters,
    "errors of NumPy": lambda value: np.seterr(**value),
    "environment variables": _set_environment,
}
_TOO_LONG = ("filters of warnings", "environment variables")
"""Settings of which a message does not tell the value."""


def settings_of_process() -> Mapping[str, Any]:
    """Return by name the settings of torch, NumPy and Python that hold for the whole process."""
    denormal = torch.tensor([1e-310], dtype=torch.float64)
    return {
        "gradient mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "flushing of denormal numbers": not (denormal * 1).any(),
        "precision of matrix products": torch.get_float32_matmul_precision(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "default device": torch.get_default_device(),
        "filters of warnings": list(warnings.filters),
        "errors of NumPy": np.geterr(),
        "environment variables": dict(os.environ),
    }


@contextmanager
def settings_left_alone() -> Iterator[None]:
    """Restore the process's settings in the end, and raise Broken where one had changed."""
    before = settings_of_process()
    yield
    changed = {name: value for name, value in settings_of_process().items() if value != before[name]}
    for name in changed:
        _SETTERS[name](before[name])
    for name, value in changed.items():
        raise Broken(
            f"changes the {name}" if name in _TOO_LONG else f"leaves the {name} at {value}, where it was {before[name]}",
            "Change settings of the process in a with statement, or not at all",
        )


_hash = hash


def _hash_of_another_process(value: object) -> int:
    """Return `hash(value)` as under another PYTHONHASHSEED where code asks for that of a text; objects keep theirs, or dictionaries break."""
    own = type(value) in (str, bytes) and sys._getframe(1).f_code.co_name != "__hash__"  # noqa: SLF001 - there is no other way to the caller
    return _hash(value) ^ 0x5EED if own else _hash(value)


@contextmanager
def another_rank() -> Iterator[None]:
    """Set the environment of another rank and give texts other hashes, as other processes have them; restore both afterwards."""
    before = {name: os.environ.get(name) for name in ANOTHER_RANK}
    os.environ.update(ANOTHER_RANK)
    builtins.hash = _hash_of_another_process
    try:
        yield
    finally:
        builtins.hash = _hash
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
