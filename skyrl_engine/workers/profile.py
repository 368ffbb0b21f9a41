"""A rank under torch's profiler: what it computes between two messages, as a trace, and on CUDA as a snapshot of its memory."""

from pathlib import Path
from typing import Any, Self

import torch
from attrs import frozen

from skyrl_engine.errors import UnsupportedError

RECORDED_ALLOCATIONS = 200_000
"""Allocations and frees that a snapshot of memory can hold; earlier ones are dropped."""


@frozen(eq=False)
class RankProfile:
    """A profile under way, of the thread that began it and of autograd's threads. `path` begins the names of its files."""

    path: Path
    profiler: Any
    memory: bool

    @classmethod
    def begin(cls, path: Path, device: str, *, memory: bool) -> Self:
        """Begin to record. Raises UnsupportedError for memory of a device that keeps no history of it."""
        of_cuda = torch.device(device).type == "cuda"
        if memory and not of_cuda:
            raise UnsupportedError(
                f"memory is recorded on CUDA devices alone, and this rank computes on {device}",
                remedy="Remove run.profile_memory; peak_bytes in metrics.jsonl is the most memory of every step",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        if memory:
            torch.cuda.memory._record_memory_history(max_entries=RECORDED_ALLOCATIONS)  # noqa: SLF001 - its documented name
        activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if of_cuda else [])]
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        return cls(path, profiler, memory)

    def end(self) -> None:
        """Stop, and write `<path>.trace.json.gz`, and `<path>.memory.pickle` where memory was recorded."""
        cuda_memory: Any = torch.cuda.memory
        self.profiler.stop()
        self.profiler.export_chrome_trace(f"{self.path}.trace.json.gz")
        if self.memory:
            cuda_memory._dump_snapshot(f"{self.path}.memory.pickle")  # noqa: SLF001 - as above
            cuda_memory._record_memory_history(enabled=None)  # noqa: SLF001
