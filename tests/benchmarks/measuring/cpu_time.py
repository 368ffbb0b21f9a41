"""CPU time of pieces of work, taken in rounds that go through all of them, so that a busy or throttled machine slows all alike.

Of the rounds the least counts: what else a machine does, above all with the memory that its processors share, only ever adds.
"""

import ctypes
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SHORTEST_SECONDS = 0.01


def interleave(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least CPU seconds of each work over `rounds`, after one call of each that is not counted."""
    for work in works.values():
        work()  # imports, caches and pages
    least = dict.fromkeys(works, math.inf)
    for _ in range(rounds):
        for name, work in works.items():
            least[name] = min(least[name], cpu_seconds(work))
    return least


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of one call; as many calls as fill a hundredth of a second, so that the clock's grain does not show."""
    calls, spent = 0, 0.0
    started = time.process_time()
    while spent < SHORTEST_SECONDS:
        work()
        calls += 1
        spent = time.process_time() - started
    return spent / calls


def of_process(pid: int) -> float:
    """CPU seconds of all threads of a process so far, to the nanosecond. Linux."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        return 0.0  # it ended
    return time.clock_gettime(clock.value)


def machine() -> str:
    """The processor's name where the system tells, its architecture elsewhere, and how many there are."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    return f"{name}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
