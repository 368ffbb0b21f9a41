"""A user's function as the course of the learning rate after warm-up."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, Final

from attrs import frozen

from skyrl_engine.contracts.values.returned import describe_returned
from skyrl_engine.errors import ContractError
from skyrl_engine.registry.function_references import function_of

_MOST_CHECKED: Final = 10_000
"""Steps that are asked for before a run begins; of a longer run as many, evenly spread."""


@frozen
class OwnSchedule:
    """The function that `optimizer.schedule` names, as `reference` says: `function(step, steps)`, a factor of the learning rate.

    `step` counts from 0 after the warm-up, and `steps` is the number of steps after it. A step is asked for when it is taken, `step` = `steps`
    beyond the end, and after a resume from the middle on: the factor may depend on nothing else.
    """

    reference: str
    function: Callable[[int, int], Any]

    @classmethod
    def load(cls, reference: str) -> "OwnSchedule":
        """Import the function. Raises DataError where there is none, and PluginBlockedError for code that may not run."""
        return cls(reference, function_of(reference, "schedule"))

    def compute_factor(self, step: int, steps: int) -> float:
        """Return the factor of a step. Raises ContractError for anything but a finite number from 0 on."""
        where = f"optimizer.schedule = {self.reference}, at step {step} of {steps}"
        try:
            returned = self.function(step, steps)
        except Exception as error:
            raise ContractError(
                f"{where}, raised {type(error).__name__}: {error}", remedy=f"Return a factor for every step from 0 to {steps}"
            ) from error
        if isinstance(returned, bool) or not isinstance(returned, Real):
            raise ContractError(f"{where}, returned {describe_returned(returned)}", remedy="Return a number: float(factor)")
        factor = float(returned)
        if not math.isfinite(factor) or factor < 0:
            raise ContractError(f"{where}, returned {factor}", remedy="Return a finite factor that is not negative")
        return factor

    def check(self, steps: int) -> None:
        """Ask for the steps of a run, and once more from its end. Raises ContractError as `compute_factor`, and for another answer."""
        asked = list_checked_steps(steps)
        first = [self.compute_factor(step, steps) for step in asked]
        for step, factor in zip(reversed(asked), reversed(first), strict=True):
            if (again := self.compute_factor(step, steps)) != factor:
                raise ContractError(
                    f"optimizer.schedule = {self.reference}, at step {step} of {steps}, returned {factor} and, when asked again, {again}",
                    remedy="Compute the factor from step and steps alone: a resumed run begins in the middle",
                )


def list_checked_steps(steps: int) -> list[int]:
    """Return steps from 0 to `steps`, both included: all, or of a long run so many that are evenly spread."""
    if steps <= _MOST_CHECKED:
        return list(range(steps + 1))
    return [number * steps // _MOST_CHECKED for number in range(_MOST_CHECKED + 1)]
