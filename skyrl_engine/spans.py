"""CPU time by span, for the run's own breakdown of a step."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Spans:
    """Adds up CPU seconds (all threads of this process) by span name. Spans nest: time inside an inner span is not counted twice."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the body's CPU time, less that of spans opened inside it, under `name`."""
        self._inner.append(0.0)
        started = time.process_time()
        try:
            yield
        finally:
            spent = time.process_time() - started
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
