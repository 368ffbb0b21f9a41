"""One worker per model: a thread that owns its engine and runs its requests one after the other, in the order of their numbers.

    POST (event loop)  ->  submit(seq, work)  ->  heap by seq  ->  thread: work()  ->  promise  ->  retrieve_future (event loop)

Clients number a model's requests from 1 and may send them out of order, or twice. Samples are not part of that order: they are drawn
between requests, and while no request waits.
"""

import asyncio
import contextlib
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from skyrl_engine import CheckpointError, ConfigError, DataError, EngineError, UnsupportedError
from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.fair_lock import FairLock

CLOSED = "the model was closed before this request's turn"

Answer = bytes | dict[str, Any]
"""An encoded protobuf message, or what becomes JSON."""


class PendingAnswer:
    """An answer that comes later; it is set once, from any thread, and waited for on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._ready = loop, asyncio.Event()
        self.answer: Answer = {}
        self.finished_at: float | None = None

    def set(self, answer: Answer) -> None:
        if self.finished_at is None:
            self.answer, self.finished_at = answer, time.monotonic()
            self._loop.call_soon_threadsafe(self._ready.set)

    def fail(self, error: BaseException) -> None:
        self.set(describe_failure(error))

    async def wait(self, seconds: float) -> bool:
        """Wait for the answer. Returns False after so many seconds without one, and when `release` is called."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), seconds)
        return self.finished_at is not None

    def release(self) -> None:
        """Let go of whoever waits, from any thread; after the loop's end nobody does."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ready.set)


def describe_failure(error: BaseException) -> dict[str, Any]:
    """Return an error as an answer: the message, and whether the user or the server caused it."""
    users = (RequestError, DataError, UnsupportedError, ConfigError, CheckpointError)
    message = error.summary if isinstance(error, EngineError) else str(error) or type(error).__name__
    return {"error": message, "category": "user" if isinstance(error, users) else "server"}


class ModelWorker:
    """The thread of one model. `pump` is called when no request waits; it returns True while it has something to do."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        gap_timeout_s: float,
        pump: Callable[[], bool],
        end: Callable[[], None],
        drains: Callable[[str], bool] = lambda _session: False,
        drop: Callable[[], None] = lambda: None,
        miss: Callable[[int, int], None] = lambda _first, _last: None,
        turns: FairLock | None = None,
    ) -> None:
        """Start the thread. Before it ends it draws the samples of sessions for which `drains` is true; `drop` ends samples of other sessions.

        `miss` is called with the first and the last of the numbers that are no longer awaited. Workers that share `turns` run one at a time.
        """
        self._miss = miss
        self._drains, self._drop, self._turns = drains, drop, turns or FairLock()
        self._loop, self._gap_timeout_s, self._pump, self._end = loop, gap_timeout_s, pump, end
        self._wake = threading.Condition()
        self._waiting: list[tuple[int, Callable[[], Answer], PendingAnswer]] = []
        self._promises: dict[int, PendingAnswer] = {}
        self._unordered: deque[tuple[Callable[[], None], PendingAnswer, str]] = deque()
        self._next, self._gap_since = 1, 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="tinker-model-worker")
        self._thread.start()

    def submit(self, number: int, work: Callable[[], Answer], promise: PendingAnswer | None = None) -> PendingAnswer:
        """Run `work` in its turn, and set `promise` (None: a new one) to its answer. A number that was submitted before returns the
        promise of that time, and runs once.
        """
        with self._wake:
            if (existing := self._promises.get(number)) is not None:
                return existing
            promise = self._promises[number] = promise or PendingAnswer(self._loop)
            if self._closing:
                promise.fail(RequestError("the model is closed"))
            elif 0 < number < self._next:
                promise.fail(
                    RequestError(f"request {number} arrived too late: later requests already ran, after {self._gap_timeout_s:g} s")
                )
            else:
                heapq.heappush(self._waiting, (number, work, promise))
                self._gap_since = time.monotonic()
                self._wake.notify()
            return promise

    def submit_unordered(self, work: Callable[[], None], promise: PendingAnswer, session: str) -> None:
        """Run `work` of a session, which sets `promise`, on the thread as soon as nothing else runs, ahead of requests that wait."""
        with self._wake:
            if self._closing:
                promise.fail(RequestError("the model is closed"))
                return
            self._unordered.append((work, promise, session))
            self._wake.notify()

    @property
    def waiting(self) -> int:
        """Count requests that wait for their turn."""
        return len(self._waiting)

    def close(self) -> None:
        """End the thread after the request that runs, and wait for it. Requests that wait are answered with a refusal."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        busy = dropped = False
        try:
            while True:
                with self._wake:
                    work = self._take_next()
                    if work is None and not busy:
                        if self._closing:
                            break
                        self._wake.wait(1.0 if self._waiting else None)
                        work = self._take_next()
                    closing = self._closing
                with self._turns:
                    if closing and not dropped:
                        dropped = True
                        self._drop()
                    if work is not None:
                        work()
                    busy = self._pump()
        finally:
            try:
                with self._turns:
                    self._end()
            finally:
                for promise in [*(promise for _, _, promise in self._waiting), *(promise for _, promise, _ in self._unordered)]:
                    promise.fail(RequestError(CLOSED))

    def _take_next(self) -> Callable[[], None] | None:
        """Take the next request; a missing number is awaited for `gap_timeout_s` at most."""
        if self._closing:
            for dropped in [item for item in self._unordered if not self._drains(item[2])]:
                self._unordered.remove(dropped)
                dropped[1].fail(RequestError(CLOSED))
            if not self._unordered:
                return None
        # the model is opened before anything is sampled from it
        if self._unordered and not (self._waiting and self._waiting[0][0] == 0):
            return self._unordered.popleft()[0]
        if not self._waiting:
            return None
        number = self._waiting[0][0]
        if number > self._next and time.monotonic() - self._gap_since < self._gap_timeout_s:
            return None
        number, work, promise = heapq.heappop(self._waiting)
        if number > self._next:
            self._miss(self._next, number - 1)
        self._next = max(self._next, number + 1)

        def run_request() -> None:
            try:
                promise.set(work())
            except BaseException as error:  # noqa: BLE001 - every error of a request is its answer, and the worker goes on
                promise.fail(error)

        return run_request
