"""The precision of products of float32 matrices, which torch keeps for the whole process: float32, or TF32 on CUDA devices."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import nn

from skyrl_engine.contracts.kinds.context import MatmulPrecision
from skyrl_engine.contracts.values.model import ComputeDtype
from skyrl_engine.errors import UnsupportedError

_REMEDY: Final = 'Set run.matmul_precision = "highest"'


def refuse_matmul_precision(precision: MatmulPrecision, dtype: ComputeDtype, device: str) -> None:
    """Raise UnsupportedError for TF32 where `device` ("cpu", "cuda:0") has none, and where nothing is computed in float32."""
    if precision == "highest":
        return
    if not device.startswith("cuda"):
        raise UnsupportedError(
            f'run.matmul_precision = "{precision}" multiplies in TF32, which CUDA devices have, and ranks compute on the {device}',
            remedy=_REMEDY,
        )
    if dtype == "float64":
        raise UnsupportedError(
            f'run.matmul_precision = "{precision}" is about products of float32, and model.dtype is float64',
            remedy=_REMEDY,
        )


@contextmanager
def multiply_in(precision: MatmulPrecision) -> Iterator[None]:
    """Multiply float32 matrices in this precision until the context is left, which restores what was set before.

    Both APIs of torch must agree or `torch.compile` fails, and the older one sets both.
    """
    before = _read()
    if before != precision:
        torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        if before not in (None, precision):
            torch.set_float32_matmul_precision(before)


def keep_angles_exact(model: nn.Module) -> None:
    """Let rotary embeddings multiply positions by frequencies in float32, whatever other products do.

    transformers computes angles by a product of matrices, and TF32 has 11 significant bits: position 2,049 would become 2,048.
    """
    for module in model.modules():
        if hasattr(module, "rope_type") and hasattr(module, "config"):
            around = _Around()
            module.register_forward_pre_hook(around.enter)
            module.register_forward_hook(around.leave, always_call=True)


class _Around:
    """Hooks around a module's forward pass, which multiplies in float32."""

    def __init__(self) -> None:
        self._open: list[AbstractContextManager[None]] = []

    def enter(self, *_: Any) -> None:
        within = multiply_in("highest")
        within.__enter__()
        self._open.append(within)

    def leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def _read() -> str | None:
    """Return torch's setting, or None where somebody set both APIs to different values: torch then refuses to say."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
