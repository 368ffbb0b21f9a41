"""Memory of tensors, counted in the profiler's allocation events, which see every tensor; resident memory would show the allocator's habits."""

import json
from collections.abc import Callable
from pathlib import Path

import torch


def highest(work: Callable[[], object], trace: Path) -> int:
    """The most bytes that were held at a time of all that `work` allocated on the CPU; `trace` is a file to write events to."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    assert events, "the profiler recorded no allocation"
    changes = torch.tensor([event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])])
    return int(changes.cumsum(0).max())
