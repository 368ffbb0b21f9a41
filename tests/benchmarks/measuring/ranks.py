"""Cost of workers on the ranks of a world: time of every call, peak memory, and how far their gradients are from others.

Functions here without a world in their arguments run on a rank.
"""

import contextlib
import ctypes
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from safetensors import safe_open
from safetensors.numpy import save_file

from skyrl_engine.testing.ranks.world import World
from skyrl_engine.testing.ranks.world_transport import WorldTransport, on_worker
from skyrl_engine.workers.messages import GatherGradients, Message
from skyrl_engine.workers.spec import WorkerSpec

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@frozen
class Cost:
    """Seconds of a call: by the clock, kernels on a CUDA device finished, and of CPU time."""

    value: Any
    wall: float
    cpu: float


class ClockedTransport(WorldTransport):
    """Adds up what its calls cost on the ranks: `wall` seconds of the slowest rank of each call, `cpu` seconds of all ranks."""

    def __init__(self, world: World, spec: WorkerSpec) -> None:
        super().__init__(world, spec)
        self.wall = self.cpu = 0.0

    def send(self, messages: Sequence[Message[Any]]) -> Callable[[], list[Any]]:
        costs: list[Cost] = self._world.run(_clock, list(messages))
        self.wall += max(cost.wall for cost in costs)
        self.cpu += sum(cost.cpu for cost in costs)
        return lambda: [cost.value for cost in costs]


def _clock(messages: Sequence[Message[Any]]) -> Cost:
    _finish()
    wall, cpu = time.perf_counter(), time.process_time()
    value = on_worker(messages)
    _finish()
    return Cost(value, time.perf_counter() - wall, time.process_time() - cpu)


def _finish() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def device_name() -> str:
    """This rank's CUDA device; empty on CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""


def give_back_memory() -> None:
    """Free what is held in reserve: of a CUDA device other ranks may need it, on CPU it would count as resident."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


def memory() -> int | None:
    """Bytes in use now: allocated on the CUDA device, or resident in this process; None where the system does not tell."""
    give_back_memory()
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else _status("VmRSS")


def forget_peak() -> None:
    """`peak_memory` counts from now on."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # no Linux, or not allowed; `peak_memory` is then that of the process's life
            CLEAR.write_text("5")


def peak_memory() -> int | None:
    """The most bytes that were in use since `forget_peak`; as `memory`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else _status("VmHWM")


def _status(key: str) -> int | None:
    found = re.search(rf"^{key}:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return None if found is None else 1024 * int(found[1])


def keep_gradients(file: Path) -> None:
    """Write the accumulated gradients of the world's workers."""
    gradients = _gradients()
    if dist.get_rank() == 0:
        save_file({name: np.ascontiguousarray(gradient, np.float32) for name, gradient in gradients.items()}, file)


def gradient_differences(file: Path) -> dict[str, tuple[float, float]]:
    """On rank 0, by parameter: ||g - g'||^2 and ||g'||^2, with g' from `keep_gradients`. Raises AssertionError for other parameters."""
    gradients = _gradients()
    if dist.get_rank():
        return {}
    with safe_open(file, "numpy") as expected:
        assert set(expected.keys()) == gradients.keys(), sorted(set(expected.keys()) ^ gradients.keys())
        return {name: _squares(gradient, expected.get_tensor(name)) for name, gradient in gradients.items()}


def _gradients() -> Mapping[str, np.ndarray]:
    gradients: Mapping[str, np.ndarray] = on_worker([GatherGradients()] * dist.get_world_size())
    return gradients


def _squares(got: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    return tuple(float(np.square(values, dtype=np.float64).sum()) for values in (got.astype(np.float64) - expected, expected))  # type: ignore[return-value] # two
