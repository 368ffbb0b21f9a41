"""Parts of bitsandbytes that hold numbers in 8 and in 4 bits."""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from skyrl_engine.errors import UnsupportedError


def import_functional(setting: str, otherwise: str) -> Any:
    """Return `bitsandbytes.functional`. Raises UnsupportedError, with the settings to change, where the package is not installed."""
    hush_advice()
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise UnsupportedError(
            f"{setting} needs the package bitsandbytes, which is not installed",
            remedy=f'Run pip install "skyrl-engine[bitsandbytes]", or {otherwise}',
        ) from error
    return functional


def hush_advice() -> None:
    """Drop what bitsandbytes says when it is imported on some CPUs: to install a package for a kernel that nothing here calls."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@cache
def list_code_values(device: torch.device, *, signed: bool) -> Tensor:
    """Return the 256 values that codes of one byte stand for, float32: of numbers that have signs, or of those that have none."""
    from bitsandbytes import functional

    values: Tensor = functional.create_dynamic_map(signed=signed)
    return values.to(device)
