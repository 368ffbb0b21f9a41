"""Counts for Prometheus, and a line per request for the log. Nothing of what clients send or are sent is in either."""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, TextIO

from attrs import define, field
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histogram of answering times; a poll is held for 25 seconds."""

WORK_SECONDS = (*SECONDS, 100.0, 300.0, 1000.0)
"""Upper bounds of the histograms of what models do, and of waiting for it."""


@define
class Counters:
    """Counters and gauges of one server, in a registry of their own."""

    registry: CollectorRegistry = field(factory=CollectorRegistry)
    log: TextIO | None = None
    _requests: Counter = field(init=False)
    _seconds: Histogram = field(init=False)
    _bytes: Counter = field(init=False)
    _wait_seconds: Histogram = field(init=False)
    _work_seconds: Histogram = field(init=False)
    _step_seconds: Histogram = field(init=False)
    _tokens: Counter = field(init=False)
    _tokens_per_second: Gauge = field(init=False)
    _loss: Gauge = field(init=False)

    def __attrs_post_init__(self) -> None:
        name = "skyrl_engine_tinker"
        self._requests = Counter(f"{name}_requests", "Requests by call and status.", ["call", "status"], registry=self.registry)
        self._seconds = Histogram(
            f"{name}_request_seconds", "Seconds until a request was answered.", ["call"], buckets=SECONDS, registry=self.registry
        )
        self._bytes = Counter(f"{name}_bytes", "Bytes of bodies.", ["direction"], registry=self.registry)
        self._wait_seconds = Histogram(
            f"{name}_wait_seconds",
            "Seconds that a request waited for its turn in its model.",
            ["call"],
            buckets=WORK_SECONDS,
            registry=self.registry,
        )
        self._work_seconds = Histogram(
            f"{name}_work_seconds",
            "Seconds that a model worked on a request in its turn.",
            ["call"],
            buckets=WORK_SECONDS,
            registry=self.registry,
        )
        self._step_seconds = Histogram(
            f"{name}_step_seconds",
            "Seconds of work for an optimizer step, its passes included.",
            buckets=WORK_SECONDS,
            registry=self.registry,
        )
        self._tokens = Counter(
            f"{name}_tokens", "Tokens by work: forward, forward_backward, sample.", ["work"], registry=self.registry
        )
        self._tokens_per_second = Gauge(
            f"{name}_tokens_per_second",
            "Tokens of a model's last optimizer step by the seconds of work for it.",
            ["slot"],
            registry=self.registry,
        )
        self._loss = Gauge(
            f"{name}_loss", "Summed loss of the passes of a model's last optimizer step.", ["slot"], registry=self.registry
        )

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

    def record_wait(self, call: str, seconds: float) -> None:
        """Count a request of a model that has its turn."""
        self._wait_seconds.labels(call).observe(seconds)

    def record_work(self, call: str, seconds: float) -> None:
        """Count a request of a model that was worked on, to its end or its failure."""
        self._work_seconds.labels(call).observe(seconds)

    def count_tokens(self, work: str, tokens: int) -> None:
        """Count tokens that were trained on, scored or sampled."""
        self._tokens.labels(work).inc(tokens)

    def record_step(self, slot: int, seconds: float, tokens: int, loss: float) -> None:
        """Note an optimizer step of the model in a slot: seconds of work, tokens and summed loss of its passes."""
        self._step_seconds.observe(seconds)
        self._tokens_per_second.labels(str(slot)).set(tokens / max(seconds, 1e-9))
        self._loss.labels(str(slot)).set(loss)

    def forget_slot(self, slot: int) -> None:
        """Drop the numbers of a slot's last step: its model is gone."""
        for gauge in (self._tokens_per_second, self._loss):
            with contextlib.suppress(KeyError):
                gauge.remove(str(slot))

    def text(self) -> bytes:
        """Return all of it in the text format of Prometheus."""
        return generate_latest(self.registry)
