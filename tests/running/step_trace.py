"""The reading of a profiler's trace: kernels that were launched, moments at which the host waited, and how much of what ranks send was hidden.

A trace is the file that `--profile` writes (Kineto's, in Chrome's format). Times in it are microseconds.
"""

import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

WAITS: Final = frozenset(
    f"{maker}{name}"
    for maker in ("cuda", "hip")
    for name in ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy", "MemcpyToSymbol", "MemcpyFromSymbol")
)
"""Calls of the driver that return when the device has done what they are about."""

LAUNCHES: Final = ("LaunchKernel", "GraphLaunch")
COMMUNICATION: Final = ("nccl", "rccl")
READS: Final = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
"""Operations that read a number of the device, on whatever device."""

Span = tuple[float, float]


@frozen
class TraceReading:
    """Findings of a trace about one rank; counts and seconds are of all recorded steps together.

    `waits` counts by the operation inside of which the host waited, `copies` by kind. `busy` is the time in which some kernel ran, out of
    `window`; `sent` that of kernels of collectives, of which other kernels ran at the same time for `hidden`.
    """

    launches: int
    kernels: int
    waits: Mapping[str, int]
    reads: Mapping[str, int]
    copies: Mapping[str, int]
    window: float
    busy: float
    sent: float
    hidden: float

    def describe(self, steps: int) -> list[str]:
        """Lines of a report, per step."""
        lines = [
            f"{self.launches / steps:.0f} launches, {self.kernels / steps:.0f} kernels",
            f"the device is busy for {self.busy / self.window:.0%} of the time" if self.window else "no kernel ran on a device",
            f"the host waits {sum(self.waits.values()) / steps:.1f} times{_list_counts(self.waits, steps)}",
            f"numbers are read {sum(self.reads.values()) / steps:.1f} times{_list_counts(self.reads, steps)}",
            f"copies{_list_counts(self.copies, steps) or ': none'}",
        ]
        if self.sent:
            lines.append(f"collectives take {self.sent / steps:.4f} s, of which {self.hidden / self.sent:.0%} beside other kernels")
        return lines


def read_trace(path: Path) -> TraceReading:
    """Read a `.trace.json.gz`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return read_events(json.load(file)["traceEvents"])


def read_events(events: Iterable[Mapping[str, Any]]) -> TraceReading:
    """Read the complete events of a trace (`"ph": "X"`); others are left out."""
    of_category: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            of_category[event.get("cat", "")].append(event)
    runtime = [*of_category["cuda_runtime"], *of_category["cuda_driver"]]
    operations = of_category["cpu_op"]
    sent = [_span(kernel) for kernel in of_category["kernel"] if _is_communication(kernel)]
    others = [_span(kernel) for kernel in of_category["kernel"] if not _is_communication(kernel)]
    busy, computing, sending = (_join(spans) for spans in ([*sent, *others], others, sent))
    return TraceReading(
        launches=sum(any(name in event["name"] for name in LAUNCHES) for event in runtime),
        kernels=len(of_category["kernel"]),
        waits=_count_inside([event for event in runtime if event["name"] in WAITS], operations),
        reads=Counter(event["name"] for event in operations if event["name"] in READS),
        copies=Counter(event["name"] for event in of_category["gpu_memcpy"]),
        window=(busy[-1][1] - busy[0][0]) / 1e6 if busy else 0.0,
        busy=_length(busy),
        sent=_length(sending),
        hidden=_length(sending) + _length(computing) - _length(busy),
    )


def _count_inside(calls: Sequence[Mapping[str, Any]], operations: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Count calls by the innermost operation of their thread around them."""
    of_thread: defaultdict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for operation in operations:
        of_thread[operation["tid"]].append((*_span(operation), operation["name"]))
    for spans in of_thread.values():
        spans.sort()
    counts: Counter[str] = Counter()
    for call in calls:
        begin, end = _span(call)
        spans = of_thread[call["tid"]]
        before = spans[: bisect_right(spans, (begin, float("inf"), ""))]
        around = next((name for _, last, name in reversed(before) if last >= end), "no operation")
        counts[f"{call['name']} in {around}"] += 1
    return counts


def _is_communication(kernel: Mapping[str, Any]) -> bool:
    return any(name in kernel["name"].lower() for name in COMMUNICATION)


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def _join(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, in order, none of which touches the next."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans) / 1e6


def _list_counts(counts: Mapping[str, int], steps: int) -> str:
    return "".join(
        f"{': ' if not place else ', '}{name} {count / steps:.1f}"
        for place, (name, count) in enumerate(sorted(counts.items(), key=lambda item: -item[1])[:6])
    )
