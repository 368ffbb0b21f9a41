"""Sampling beside training: a source of groups at work in a thread of its own, which alone touches ledger, runner, journal and sampler.

The trainer's thread hands it orders: a batch for a step, the end of a step, new weights. Weights are gathered in the trainer's thread, since
the ranks change theirs next. Groups that a reward model on the ranks values go there and back, whenever the trainer waits for an order. The
sampling thread gives weights to the generators when their turn has come:

- in flight, at once, and groups under way go on with them;
- or drained: when every group that the weights before them may start has ended. Which version starts a ticket then follows from what was
  dropped before it alone, and so does every bit, where tickets are trained in their order.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from attrs import define, field

from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.errors import RolloutError
from skyrl_engine.rollout.arrow_codec import LearnedAttempt
from skyrl_engine.rollout.group_source import RolloutSource, StepBatch, Valued
from skyrl_engine.spans import Phases

_SLICE_S: Final = 0.05
"""The longest that the thread samples without looking for an order."""

_IDLE_S: Final = 0.25
_ENDING_S: Final = 60.0

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Handover(Protocol):
    """The two halves of an update: `write` in the trainer's thread, `take` in the sampling one."""

    def write(self, version: int) -> None:
        """Gather the present weights as those of `version`."""

    def take(self, version: int) -> None:
        """Give what was gathered to the generators, and check that they hold it."""


@define(eq=False)
class _Order(Generic[Result]):
    """Work for the sampling thread, once `attempt` returns something; its caller waits for that."""

    attempt: Callable[[], Result | None]
    done: threading.Event = field(factory=threading.Event)
    result: Result | None = None
    failure: BaseException | None = None


@define
class SamplingStatus:
    """Seconds that were waited since the last report, and the lengths of queues when the groups of the last step were all there.

    `trainer_waited` are seconds in which training waited for groups, `sampler_waited` those in which sampling could start nothing until a step
    is trained, `drain` those in which an update waited for groups to end. `groups_ready` were there beside those of the step, `groups_running`
    under way; of their attempts, `at_generator` and `at_environment` waited for an answer.
    """

    trainer_waited: float = 0.0
    sampler_waited: float = 0.0
    drain: float = 0.0
    groups_ready: int = 0
    groups_running: int = 0
    at_generator: int = 0
    at_environment: int = 0


@define(eq=False)
class BackgroundSource:
    """A `GroupSource` that samples while the trainer trains. Use it as a context: leaving it ends the thread.

    `valued` adds to the rewards of groups on the ranks, one group at a time, in the trainer's thread.
    """

    source: RolloutSource
    handover: Handover
    drains: bool
    phases: Phases
    """The trainer's, in which a wait for groups counts as `wait`."""
    progress: Callable[[int, int], None] | None = None
    valued: Valued | None = None
    status: SamplingStatus = field(factory=SamplingStatus, init=False)
    _orders: "SimpleQueue[_Order[Any] | Group]" = field(factory=SimpleQueue, init=False)
    """To the sampling thread: orders, and groups that were valued."""
    _replies: "SimpleQueue[Group | None]" = field(factory=SimpleQueue, init=False)
    """To the trainer's thread: groups to value, and None where an order was carried out."""
    _unvalued: int = field(default=0, init=False)
    """Groups on their way to the ranks and back, as the sampling thread counts."""
    _open: "deque[_Order[Any]]" = field(factory=deque, init=False)
    """Orders that the thread has taken and not carried out."""
    _written: "deque[int]" = field(factory=deque, init=False)
    """Versions that were gathered and that the generators do not have."""
    _ready: int = field(default=0, init=False)
    """Groups that may be trained on, as the sampling thread counted last: the ledger itself is that thread's alone."""
    _closing: threading.Event = field(factory=threading.Event, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _thread: threading.Thread = field(init=False)

    @_thread.default
    def _make_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="sampling", daemon=True)

    def __enter__(self) -> Self:
        if self.valued is not None:
            self.source.on_ended = self._send_to_ranks
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join(_ENDING_S)
        if self._thread.is_alive():
            logger.warning("sampling did not end within %g s; what it waits for is ended with it", _ENDING_S)

    # --- the trainer's thread ------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Count the steps that were trained."""
        return self.source.step

    def take(self, step: int) -> StepBatch:
        """Wait for the groups of a step. Raises what sampling met."""

        def attempt() -> StepBatch | None:
            batch = self.source.take_ready(step)
            if batch is not None:
                self._count_queues(len(batch.groups))
            return batch

        return self._ask(attempt, waits_for_groups=True)

    def finish_step(self, step: int, groups: Sequence[Group], learned: Sequence[LearnedAttempt]) -> None:
        """Take the end of a step; what it learned is on the disk when this returns."""

        def finish() -> bool:
            self.source.finish_step(step, groups, learned)
            return True

        self._ask(finish)

    def publish(self, version: int) -> None:
        """Gather the present weights as those of `version`; the generators get them when their turn has come."""
        self.handover.write(version)
        self._orders.put(_Order(lambda: self._note_written(version)))

    def at_rest(self, work: Callable[[], Result]) -> Result:
        """Do something between two updates, when the generators have the weights of the last step: an evaluation, or a checkpoint."""

        def do() -> tuple[Result] | None:
            return (work(),) if self.source.ledger.version == self.source.ledger.step else None

        return self._ask(do)[0]

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps; called in `at_rest`."""
        return self.source.state()

    def _ask(self, attempt: Callable[[], Result | None], *, waits_for_groups: bool = False) -> Result:
        """Let the sampling thread do something, and value groups meanwhile."""
        order = _Order(attempt)
        self._orders.put(order)
        while not order.done.is_set():
            began = time.perf_counter()
            with self.phases("wait") if waits_for_groups else nullcontext():
                group = self._receive_reply()
            if waits_for_groups:
                self.status.trainer_waited += time.perf_counter() - began
            if group is not None:
                assert self.valued is not None, "groups come where a model values them"
                with self.phases("score"):
                    (group,) = self.valued([group])
                self._orders.put(group)
                continue
            if self._failure is not None:
                raise self._failure
            if not self._thread.is_alive() and not order.done.is_set():
                raise RolloutError("sampling has ended", remedy="Resume the run with checkpoint.resume = true")
            if self.progress is not None:
                self.progress(self._ready, self.source.ledger.groups)
        if order.failure is not None:
            raise order.failure
        assert order.result is not None, "an order is done when it has a result"
        return order.result

    def _receive_reply(self) -> Group | None:
        """Wait a moment for something that the sampling thread says."""
        try:
            return self._replies.get(timeout=_IDLE_S)
        except Empty:
            return None

    # --- the sampling thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._publish_due()
                self._carry_out()
                began = time.perf_counter()
                if self.source.can_advance:
                    self.source.advance(_SLICE_S)
                    self._receive(0.0)
                else:
                    self._receive(_IDLE_S)
                    self.status.sampler_waited += time.perf_counter() - began
                self._ready = self.source.ready
                if self._written:
                    self.status.drain += time.perf_counter() - began
        except BaseException as error:  # noqa: BLE001 - it is raised in the trainer's thread
            self._failure = error
            for order in self._open:
                order.failure = error
                self._reply(order)

    def _receive(self, timeout: float) -> None:
        """Take what the trainer's thread sent, or the first that comes within `timeout` seconds: orders to carry out, groups to take in."""
        try:
            received = self._orders.get(timeout=timeout) if timeout > 0 else self._orders.get_nowait()
            while True:
                if isinstance(received, _Order):
                    self._open.append(received)
                else:
                    self._unvalued -= 1
                    self.source.take_in(received)
                received = self._orders.get_nowait()
        except Empty:
            return

    def _send_to_ranks(self, group: Group) -> None:
        """Let a group that has ended be valued; it is taken in when it comes back."""
        self._unvalued += 1
        self._replies.put(group)

    def _reply(self, order: _Order[Any]) -> None:
        order.done.set()
        self._replies.put(None)

    def _count_queues(self, taken: int) -> None:
        runner, status = self.source.runner, self.status
        status.groups_ready, status.groups_running = self.source.ready - taken, runner.running + self._unvalued
        status.at_generator, status.at_environment = runner.at_generator, runner.at_environment

    def _carry_out(self) -> None:
        """Carry out orders, in the order in which they came, up to the first whose time has not come."""
        while self._open:
            order = self._open[0]
            try:
                order.result = order.attempt()
            except Exception as error:  # noqa: BLE001 - its caller raises it
                order.failure = error
            if order.result is None and order.failure is None:
                return
            self._open.popleft()
            self._reply(order)

    def _note_written(self, version: int) -> bool:
        self._written.append(version)
        return True

    def _publish_due(self) -> None:
        """Give gathered weights to the generators: every version in its turn where groups end first, else the newest."""
        if not self.drains and self._written:
            version = self._written.pop()
            self._written.clear()
            self._give(version)
        while self._written and not self.source.can_advance and not self._unvalued:
            self._give(self._written.popleft())

    def _give(self, version: int) -> None:
        self.handover.take(version)
        self.source.publish(version)
