"""Tasks of ranks about sums of gradients: importable by name, because ranks are spawned."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from attrs import frozen
from fsdp_tasks import arrays, own_rows, start

from skyrl_engine.contracts import AdamWSettings
from skyrl_engine.testing.backends.batches import Arrays, WeightedObjective, build_padded, documents
from skyrl_engine_fsdp.plugin import FsdpConfig


@frozen
class CountedSums:
    """By number of micro-batches, the sums of a call and the gradient after it; and those of two calls of two micro-batches."""

    of_one_call: list[tuple[int, dict[str, int], Arrays]]
    of_two_calls: tuple[dict[str, int], Arrays]


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what ranks send each other to sum."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **named)

        return call

    # torch 2.13 gives the second another name
    scatter = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    with (
        patch.object(dist, "all_reduce", counted("all_reduce", dist.all_reduce)),
        patch.object(dist, scatter, counted("reduce_scatter", getattr(dist, scatter))),
    ):
        yield counts


def count_sums(directory: str, options: FsdpConfig) -> CountedSums:
    backend = start(directory, options=options, dtype="float64")
    rows = own_rows(documents(), backend)

    def learn(size: int) -> None:
        backend.forward_backward(build_padded(rows, size), WeightedObjective())

    of_one_call = []
    for size in (len(rows), len(rows) // 2):
        with counting() as counts:
            learn(size)
        of_one_call.append((len(rows) // size, dict(counts), arrays(backend.gradients())))
        backend.zero_grad()
    with counting() as counts:
        learn(len(rows) // 2)
        learn(len(rows) // 2)
    result = CountedSums(of_one_call, (dict(counts), arrays(backend.gradients())))
    backend.close()
    return result


def fail_and_go_on(directory: str, options: FsdpConfig) -> tuple[Arrays, Arrays]:
    """Gradients of a pass, and of the same after one that failed in between, of which one micro-batch was differentiated."""

    class Failing(WeightedObjective):
        calls = 0

        def __call__(self, *arguments: Any) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise ZeroDivisionError
            return super().__call__(*arguments)

    backend = start(directory, AdamWSettings(), options=options)
    rows = build_padded(own_rows(documents(), backend), 1)
    backend.forward_backward(rows, WeightedObjective())
    first = arrays(backend.gradients())
    backend.zero_grad()
    try:
        backend.forward_backward(rows, Failing())
    except ZeroDivisionError:
        backend.zero_grad()
    backend.forward_backward(rows, WeightedObjective())
    again = arrays(backend.gradients())
    backend.close()
    return first, again
