"""Time by span, for the run's own breakdown of a step."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Spans:
    """Adds up seconds by span name: of CPU time (all threads of this process), or by another clock. Spans nest: time inside an inner span is
    not counted twice.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the body's time, less that of spans opened inside it, under `name`."""
        self._inner.append(0.0)
        started = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - started
            own = spent - self._inner.pop()
            self._seconds[name] = self._seconds.get(name, 0.0) + own
            if self._inner:
                self._inner[-1] += spent

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add another clock's seconds, for instance a rank's."""
        for name, value in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + value

    def drain(self) -> dict[str, float]:
        """Seconds by name since the last drain."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class Phases:
    """Wall seconds and CPU seconds of this process by phase, in two `Spans`."""

    def __init__(self) -> None:
        self.wall = Spans(time.perf_counter)
        self.cpu = Spans()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the body's time under `name`, less that of phases opened inside it."""
        with self.wall(name), self.cpu(name):
            yield
