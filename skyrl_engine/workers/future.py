"""Answers of ranks that the caller may wait for later."""

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")
Changed = TypeVar("Changed")


class Future(Generic[Answer]):
    """The answer to a call. `result()` waits for it and returns it, or raises what the call met; it may be asked any number of times."""

    def __init__(self, wait: Callable[[], Answer]) -> None:
        self._wait: Callable[[], Answer] | None = wait
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self._on_failure: list[Callable[[], None]] = []

    def result(self) -> Answer:
        """Wait for the answer. Raises what the call met, or what an earlier call met whose answer nobody took."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            try:
                self._answer = wait()
            except BaseException as error:
                self._error = error
                for do in self._on_failure:
                    do()
                raise
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value] # without an error there is an answer

    @property
    def settled(self) -> bool:
        """True once somebody has waited for this answer."""
        return self._wait is None

    def on_failure(self, do: Callable[[], None]) -> "Future[Answer]":
        """Call `do` once if the call turns out to have failed, whoever waits for it first."""
        self._on_failure.append(do)
        return self

    def then(self, change: Callable[[Answer], Changed]) -> "Future[Changed]":
        """A future of the changed answer; the change is made once, by whoever waits first."""
        return Future(lambda: change(self.result()))


class Calls:
    """Calls that were made and whose answers nobody has taken, oldest first. Ranks work through them in this order."""

    def __init__(self) -> None:
        self._open: deque[tuple[int, Future[Any]]] = deque()
        self._made = 0

    def make_future(self, wait: Callable[[], Answer]) -> Future[Answer]:
        """A future of this call, which first waits for all calls before it."""
        number = self._made
        self._made += 1

        def in_turn() -> Answer:
            self._settle_before(number)
            return wait()

        future = Future(in_turn)
        self._open.append((number, future))
        return future

    def settle(self) -> None:
        """Wait for everything that is under way. Raises the first failure that nobody has seen."""
        self._settle_before(self._made)

    def _settle_before(self, number: int) -> None:
        while self._open and self._open[0][0] < number:
            _, future = self._open.popleft()
            if not future.settled:
                future.result()
