"""Detection of casts in a loss or a correction that lose digits in every precision alike, which no comparison of precisions shows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_HALF = (torch.bfloat16, torch.float16)
_NARROW = (torch.int8, torch.uint8, torch.int16)


class LossyCasts(TorchFunctionMode):
    """Keeps in `cause` the first cast to half precision, or to an integer type too small for a value of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cause: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.cause is None and isinstance(result, torch.Tensor):
            self.cause = _loss_of(result, args[0] if args else None)
        return result


def _loss_of(result: torch.Tensor, source: object) -> str | None:
    if result.dtype in _HALF:
        return f"computes in {result.dtype}, whatever the precision of its input"
    if result.dtype not in _NARROW or not isinstance(source, torch.Tensor) or source.shape != result.shape:
        return None
    if source.dtype.is_floating_point or source.dtype == torch.bool or not bool((source != result.to(source.dtype)).any()):
        return None
    largest = int(source.abs().max())
    return f"casts whole numbers as large as {largest} to {result.dtype}, which holds no more than {torch.iinfo(result.dtype).max}"
