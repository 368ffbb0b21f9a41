"""An observer whose failures a run survives: it is warned of once, and what is missing there is told at the end.

    run ──► tell(event) ──► [queue ──► thread] ──► the observer's hook ──► failed? remember the event

The queue and the thread are there for an observer with `finish_seconds`, so that a network which does not answer keeps nobody waiting.
"""

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import TypeAlias

from skyrl_engine.contracts.kinds.observer import (
    CheckpointSaved,
    EvaluationFinished,
    RolloutsFinished,
    SessionFinished,
    SessionStarted,
    StepFinished,
)
from skyrl_engine.errors import EngineError
from skyrl_engine.registry.host import PluginHost
from skyrl_engine.registry.owner import Owner

Event: TypeAlias = SessionStarted | RolloutsFinished | StepFinished | EvaluationFinished | CheckpointSaved | SessionFinished

HOOKS: dict[type[Event], str] = {
    SessionStarted: "skyrl_engine_session_started",
    RolloutsFinished: "skyrl_engine_rollouts_finished",
    StepFinished: "skyrl_engine_step_finished",
    EvaluationFinished: "skyrl_engine_evaluation_finished",
    CheckpointSaved: "skyrl_engine_checkpoint_saved",
    SessionFinished: "skyrl_engine_session_finished",
}

LONGEST_QUEUE = 10_000
"""Events that wait for an observer in its thread; further ones are missing there, so that a run's memory stays bounded."""

logger = logging.getLogger(__name__)


class LenientObserver:
    """Tells one observer the events of a session and raises nothing that its hooks raise.

    `hooks` are those that it implements. With `finish_seconds` it is told in a thread, which the end of the session waits so long for.
    """

    def __init__(self, observer: object, owner: Owner) -> None:
        self._host = PluginHost()
        self._owner = owner
        self._hooks = self._host.register(observer, owner)
        self._patience: float | None = getattr(observer, "finish_seconds", None)
        self._queue: Queue[Event | None] = Queue(LONGEST_QUEUE)
        self._thread: Thread | None = None
        self._lock = Lock()
        self._missing: list[Event] = []
        self._cause: str | None = None
        self._never_started = False
        self._taken: tuple[Event, ...] = ()

    def tell(self, event: Event) -> None:
        """Tell the observer, or its thread, an event. The end of the session waits for the thread, and says what is missing."""
        is_last = isinstance(event, SessionFinished)
        deadline = time.monotonic() + (self._patience or 0.0)
        if HOOKS[type(event)] in self._hooks:
            if self._patience is None:
                self._call(event)
            else:
                self._enqueue(event, seconds=self._patience if is_last else 0.0)
        if is_last:
            self._end(deadline)

    def _enqueue(self, event: Event, *, seconds: float) -> None:
        """Put an event into the queue, waiting so long for room."""
        try:
            self._queue.put(event, timeout=seconds)
        except Full:
            self._miss([event], f"{self._owner.label} is {LONGEST_QUEUE:,} events behind")
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._owner.label, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            self._taken = (event,)
            self._call(event)
            self._taken = ()

    def _call(self, event: Event) -> None:
        if self._never_started:
            with self._lock:
                self._missing.append(event)
            return
        hook = getattr(self._host.hook, HOOKS[type(event)])
        try:
            if isinstance(event, SessionStarted):
                hook.call_historic(kwargs={"event": event})
            else:
                hook(event=event)
        except EngineError as error:  # whatever else the observer raises, the host has made one of it
            self._never_started = isinstance(event, SessionStarted)
            self._miss([event], error.cause)

    def _miss(self, events: Iterable[Event], cause: str) -> None:
        with self._lock:
            self._missing += events
            first, self._cause = self._cause is None, self._cause or cause
        if first:
            logger.warning("%s; the run goes on", cause)

    def _end(self, deadline: float) -> None:
        if self._thread is not None:
            # None ends the thread; one that takes nothing until the deadline is left behind
            with suppress(Full):
                self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                cause = f"{self._owner.label} was not done {self._patience:g} s (finish_seconds) after the session's end"
                self._miss([*self._taken, *self._drain()], cause)
        if self._cause is not None:
            logger.warning("%s lacks %s. First cause: %s", self._owner.label, _describe(self._missing), self._cause)

    def _drain(self) -> list[Event]:
        left: list[Event] = []
        while True:
            try:
                event = self._queue.get_nowait()
            except Empty:
                return left
            if event is not None:
                left.append(event)


def _describe(events: Iterable[Event]) -> str:
    """Return what is missing where these events are: "steps 3-5 and 9 (step_finished), checkpoint_saved of step 4"."""
    steps: dict[str, list[int]] = {}
    for event in events:
        name = HOOKS[type(event)].removeprefix("skyrl_engine_")
        steps.setdefault(name, []).append(event.start_step if isinstance(event, SessionStarted) else event.step)
    return ", ".join(f"{name} of {_name_steps(numbers)}" for name, numbers in steps.items()) or "what its end would have written"


def _name_steps(numbers: list[int]) -> str:
    """Return sorted steps with runs of them in short: "step 3", "steps 3-5, 9"."""
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    runs = [f"{first}-{last}" if first != last else f"{first}" for first, last in zip(starts, ends, strict=True)]
    return f"{'step' if len(numbers) == 1 else 'steps'} {', '.join(runs)}"
