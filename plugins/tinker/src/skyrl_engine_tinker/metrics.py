"""Counts for Prometheus, and a line per request for the log. Nothing of what clients send or are sent is in either."""

import json
import time
from collections.abc import Callable
from typing import Any, TextIO

from attrs import define, field
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histogram of answering times; a poll is held for 25 seconds."""


@define
class Counters:
    """Counters and gauges of one server, in a registry of their own."""

    registry: CollectorRegistry = field(factory=CollectorRegistry)
    log: TextIO | None = None
    _requests: Counter = field(init=False)
    _seconds: Histogram = field(init=False)
    _bytes: Counter = field(init=False)

    def __attrs_post_init__(self) -> None:
        name = "skyrl_engine_tinker"
        self._requests = Counter(f"{name}_requests", "Requests by call and status.", ["call", "status"], registry=self.registry)
        self._seconds = Histogram(
            f"{name}_request_seconds", "Seconds until a request was answered.", ["call"], buckets=SECONDS, registry=self.registry
        )
        self._bytes = Counter(f"{name}_bytes", "Bytes of bodies.", ["direction"], registry=self.registry)

    def gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """Add a number that is asked for when somebody looks."""
        Gauge(f"skyrl_engine_tinker_{name}", about, registry=self.registry).set_function(value)

    def count_request(self, call: str, status: int, seconds: float, received: int, sent: int) -> None:
        """Count a request, and write its line."""
        self._requests.labels(call, str(status)).inc()
        self._seconds.labels(call).observe(seconds)
        self._bytes.labels("received").inc(received)
        self._bytes.labels("sent").inc(sent)
        if self.log is not None:
            line: dict[str, Any] = {"time": round(time.time(), 3), "call": call, "status": status, "seconds": round(seconds, 4)}
            print(json.dumps({**line, "received": received, "sent": sent}), file=self.log, flush=True)

    def text(self) -> bytes:
        """Return all of it in the text format of Prometheus."""
        return generate_latest(self.registry)
