"""The hint for a run whose steps wait for environments."""

from collections.abc import Mapping
from typing import Final

from attrs import define, field

WORTH_TELLING: Final = 0.5
"""Share of a step from which a wait for environments is told."""


@define
class EnvironmentWaits:
    """The waits for environments of a session, whose `processes` answer one call at a time each."""

    processes: int
    _steps: int = field(default=0, init=False)
    _has_told: bool = field(default=False, init=False)

    def describe(self, phases: Mapping[str, float], reported: Mapping[str, float], seconds: float, attempts: int) -> str | None:
        """Return a sentence, once, where environments were waited for most of a step and each process had several attempts to answer.

        `phases` are the wall seconds by phase, and `reported` the metrics of a step of so many seconds and attempts. In the first one
        processes start, and so it says nothing.
        """
        self._steps += 1
        waited, asked = phases.get("environment", 0.0), float(attempts)
        if "async/attempts_at_environment" in reported:
            waited, asked = phases.get("wait", 0.0), reported["async/attempts_at_environment"]
        if self._has_told or self._steps == 1 or waited < WORTH_TELLING * seconds or asked <= self.processes:
            return None
        self._has_told = True
        count = "1 process answers" if self.processes == 1 else f"{self.processes} processes answer"
        return (
            f"environments were waited for in {waited / seconds:.0%} of a step: {count} {asked:.0f} attempts, one call at a time. "
            "If environments wait for something rather than compute, raise rollouts.workers"
        )
