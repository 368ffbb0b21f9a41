"""A lock that threads get in the order in which they ask for it: workers of models on the same ranks take turns, and none waits for ever."""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType


class FairLock:
    """A context manager that one thread is in at a time. A plain lock would often go back to the thread that has just left it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False

    @contextlib.contextmanager
    def release_meanwhile(self) -> Iterator[None]:
        """Give the lock to others meanwhile, and wait for another turn at the end. Only for the thread that has it."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()
