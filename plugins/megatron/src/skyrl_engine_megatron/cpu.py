"""Stand-ins on the CPU for the CUDA functions that megatron-core always calls. A rank on a CUDA device never imports this module.

They are in force inside `without_cuda()` only; outside, torch and megatron-core are unchanged.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.eval_frame import skip_code
from torch.overrides import TorchFunctionMode

from skyrl_engine_megatron.library import parallel_random

_CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Makes `device="cuda"` mean `device`, the rank's, and `Tensor.cuda()` a move there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if kwargs and "device" in kwargs and torch.device(kwargs["device"] or _CPU).type == "cuda":
            kwargs = {**kwargs, "device": self._device}
        return func(*args, **(kwargs or {}))


# programs are of layers: without this, torch would also make some of this function, for each form of arguments
skip_code(_OnCpu.__torch_function__.__code__)


class _NoStates:
    """An empty tracker of CUDA's random states: the models that are built here draw no random numbers."""

    def fork(self, _name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, _states: dict[str, torch.Tensor]) -> None:
        """There are none."""


@contextmanager
def without_cuda(device: torch.device = _CPU) -> Iterator[None]:
    """Let megatron-core run on `device`, a CPU: replace devices, synchronization, and the random states that recomputation restores."""
    cuda = patch.multiple(torch.cuda, current_device=lambda: device, synchronize=lambda *_: None)
    states = patch.multiple(
        parallel_random,
        _CUDA_RNG_STATE_TRACKER=_NoStates(),
        _CUDA_RNG_STATE_TRACKER_INITIALIZED=True,
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )
    with cuda, states, _OnCpu(device):
        yield
