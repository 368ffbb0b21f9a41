"""The failure monitor: it counts failed attempts, logs each kind of failure once as a warning, and ends a run in which too many fail."""

import logging
import re
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from attrs import define, field

from skyrl_engine.errors import RolloutError

logger = logging.getLogger(__name__)

WINDOW: Final = 200
"""Number of latest attempts among which failures are counted."""

TIMED_OUT: Final = "timed out after"
"""The words in the cause of a failure for a call that took too long."""

GAVE_UP: Final = "the generator gave up"
"""The first words in the cause of a failure for a request that the generator did not answer."""

_PLACE: Final = re.compile(r"[^\s(:]+\.py, line \d+, in [\w<>.]+")
"""The place in the code of an environment or a reward that raised, as `registry.owner` writes it."""

_FIRST: Final = 8
"""This many failures without a success end a run that begins; a whole group, where that is larger."""

_MAX_WARNINGS: Final = 5
_MAX_CAUSES: Final = 3
_TASK: Final = "\0"
"""Placeholder for the task's name in a failure's text: one mistake that fails many tasks is one cause."""


def name_remedy(causes: Sequence[str]) -> str:
    """Return what to correct where attempts failed for these causes: the commonest place where code raised, the time limit where it passed,
    the generator where it gave up.
    """
    late = [cause for cause in causes if TIMED_OUT in cause]
    given_up = [cause for cause in causes if cause.startswith(GAVE_UP)]
    others = [cause for cause in causes if cause not in (*late, *given_up)]
    places = Counter(match[0] for cause in others if (match := _PLACE.search(cause)) is not None)
    steps = [f"correct {places.most_common(1)[0][0]}"] if places else ["correct the environment"] if others else []
    steps += ["see that the generator's server answers, and [generator]"] if given_up else []
    steps += ["raise rollouts.timeout_s"] if late else []
    sentence = ", or ".join(steps)
    return sentence[:1].upper() + sentence[1:]


@define(eq=False)
class FailureMonitor:
    """Counts the attempts that failed among the last `WINDOW`.

    `max_share` of them may fail (0 to 1). `all_may_fail` goes on where all attempts failed since the run began. `group_size` is the number of
    attempts of a group.
    """

    max_share: float
    group_size: int
    all_may_fail: bool = False
    _last: deque[tuple[str, str] | None] = field(factory=lambda: deque(maxlen=WINDOW), init=False)
    """Kind and task of each failure; None for an attempt that did not fail."""
    _warned_of: set[str] = field(factory=set, init=False)
    _failed_after_answering: int = field(default=0, init=False)

    @property
    def first(self) -> int:
        """The number of attempts that must all have failed before the run ends for it."""
        return max(_FIRST, self.group_size)

    def record(self, task: str, cause: str | None, *, has_answered: bool, all_first_ended: bool) -> None:
        """Record the end of an attempt at `task`; `cause` is None where it did not fail.

        `has_answered` says that the model completed a turn of it, `all_first_ended` that none of the run's first attempts is under way: an
        attempt that cannot begin ends before others that may succeed.

        Raises RolloutError, with the commonest causes, where too many of the last attempts failed, or all did since the run began.
        """
        self._failed_after_answering += cause is not None and has_answered
        name = f"task {task!r}"
        kind = None if cause is None else cause.replace(name, _TASK)
        self._last.append(None if kind is None else (kind, name))
        if kind is None:
            return
        self._log(kind, cause)
        failures = [failure for failure in self._last if failure is not None]
        is_known = self._failed_after_answering >= self.first or all_first_ended
        all_failed = not self.all_may_fail and is_known and len(failures) == len(self._last) >= self.first
        if all_failed or len(failures) > self.max_share * WINDOW:
            raise self._explain(failures, all_failed=all_failed)

    def _log(self, kind: str, cause: str | None) -> None:
        is_new = kind not in self._warned_of and len(self._warned_of) < _MAX_WARNINGS
        if is_new:
            self._warned_of.add(kind)
        logger.log(logging.WARNING if is_new else logging.INFO, "an attempt failed: %s", cause)

    def _explain(self, failures: list[tuple[str, str]], *, all_failed: bool) -> RolloutError:
        tasks: dict[str, dict[str, None]] = {}
        for kind, task in failures:
            tasks.setdefault(kind, {})[task] = None
        common = Counter(kind for kind, _ in failures).most_common(_MAX_CAUSES)
        names = {kind: next(iter(keys)) + (" and others" if len(keys) > 1 else "") for kind, keys in tasks.items()}
        allowed = f"rollouts.max_failure_share is {self.max_share:g} of {WINDOW}"
        return RolloutError(
            f"all of the first {len(failures)} attempts failed"
            if all_failed
            else f"{len(failures)} of the last {len(self._last)} attempts failed, and {allowed}",
            remedy=f"{name_remedy([kind for kind, _ in failures])}, or raise rollouts.max_failure_share{' to 1' if all_failed else ''}",
            details=[f"{count} x {kind.replace(_TASK, names[kind])}" for kind, count in common],
        )
