"""Ctrl-C, SIGTERM and SIGHUP, a lost terminal, ask a run to end after its current step; a second one ends it at once."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from attrs import define

logger = logging.getLogger(__name__)


@define
class StopRequest:
    """`signal_name` is the signal that asked the run to stop, None while nothing did.

    Only while `can_wait` is a signal a request: before and after the training loop there is no step to finish, and it ends the run at once.
    """

    signal_name: str | None = None
    can_wait: bool = False

    def __bool__(self) -> bool:
        return self.signal_name is not None


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a request where it can wait; any other raises KeyboardInterrupt.

    A SIGHUP that is ignored, as under nohup, stays ignored. Outside the main thread signals cannot be received, and nothing changes.
    """
    request = StopRequest()
    # a signal may come in the middle of a line of the log, where no other can be written: a thread writes it behind that one
    received: SimpleQueue[str | None] = SimpleQueue()

    def receive(number: int, _frame: FrameType | None) -> None:
        if request or not request.can_wait:
            raise KeyboardInterrupt
        request.signal_name = signal.Signals(number).name
        received.put(request.signal_name)

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    teller = threading.Thread(target=_log_requests, args=(received,), name="stop requests", daemon=True)
    teller.start()
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        received.put(None)
        teller.join()


def _log_requests(received: SimpleQueue[str | None]) -> None:
    while (name := received.get()) is not None:
        logger.warning("%s: the run ends after the current step, a second signal ends it at once", name)
