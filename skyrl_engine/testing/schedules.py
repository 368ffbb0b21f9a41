"""Promises of a function that `optimizer.schedule` names."""

from collections.abc import Sequence

from skyrl_engine.engine.own_schedule import OwnSchedule, list_checked_steps
from skyrl_engine.errors import EngineError
from skyrl_engine.testing.another_process import ask
from skyrl_engine.testing.promise import Broken


def verify_schedule(reference: str, steps: Sequence[int] = (1, 2, 100, 20_000)) -> None:
    """Hold `./file.py:name`, or `package.module:name`, to the promises of a schedule, for runs of so many steps after the warm-up.

    At every step it returns a finite number that is not negative, the same when it is asked again and in a process with another hash seed and
    another time. Raises AssertionError that names the step.
    """
    for total in steps:
        try:
            OwnSchedule.load(reference).check(total)
        except EngineError as error:
            raise Broken(error.cause, error.remedy) from error
        here, there = list_factors(reference, total), ask(list_factors, reference, total)
        for step, own, other in zip(list_checked_steps(total), here, there, strict=True):
            if own != other:
                raise Broken(
                    f"{reference}, at step {step} of {total}, returns {own} here and {other} in another process",
                    "Compute the factor from step and steps alone",
                )


def list_factors(reference: str, steps: int) -> list[float]:
    """Return the factors of the steps of a run that are checked."""
    schedule = OwnSchedule.load(reference)
    return [schedule.compute_factor(step, steps) for step in list_checked_steps(steps)]
