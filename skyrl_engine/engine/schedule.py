"""The learning rate as a pure function of the step: nothing to save but the step's number."""

import math
from collections.abc import Callable, Mapping
from typing import Final

from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.engine.own_schedule import OwnSchedule
from skyrl_engine.errors import UnsupportedError

_DEFAULT_TIMESCALE: Final = 10_000

_RISES: Final[Mapping[str, Callable[[float], float]]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "1-sqrt": lambda progress: 1 - math.sqrt(1 - progress),
}
"""Forms of warm-up: the part of the rate at a progress from 0 to 1."""

_DECAYS: Final[Mapping[str, Callable[[float], float]]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Forms of decay: the part of the rate at a progress from 0 to 1."""


def load_own_schedule(optimizer: OptimizerConfig, total_steps: int | None) -> OwnSchedule | None:
    """Load and check the function that `optimizer.schedule` names; None for a built-in course.

    Raises UnsupportedError as `refuse_impossible_schedule`, and what `OwnSchedule` raises.
    """
    refuse_impossible_schedule(optimizer, total_steps)
    if not optimizer.names_function or total_steps is None:
        return None
    own = OwnSchedule.load(optimizer.schedule)
    own.check(_count_after_warmup(optimizer, total_steps))
    return own


def _count_after_warmup(optimizer: OptimizerConfig, total_steps: int) -> int:
    return max(1, total_steps - optimizer.warmup_steps)


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int, own: OwnSchedule | None = None) -> float:
    """The rate of optimizer step `step`, counted from 0, of `total_steps`.

    Warm-up: rate * rise((step + 1) / warmup_steps) for the first `warmup_steps` steps, so no step is spent at rate 0; rise(x) is x,
    (1 - cos(pi x)) / 2 or 1 - sqrt(1 - x), as `optimizer.warmup` says. Then, with progress p from 0 at the first step after the warm-up to 1
    at `total_steps`, and m = `min_ratio`, as in the schedulers of transformers:

    - constant: 1
    - linear: 1 - p
    - cosine: (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, eq. 5, one cycle)
    - cosine_with_min: m + (1 - m) (1 + cos(pi p)) / 2
    - polynomial: m + (1 - m) (1 - p)^power
    - inverse_sqrt: sqrt(timescale / (timescale + steps since the warm-up)), without an end (Vaswani et al. 2017, eq. 3, where timescale is
      warmup_steps)
    - wsd: 1 until `decay_steps` before the end, then m + (1 - m) decay(q) with q from 0 to 1 over these; decay(q) is 1 - q,
      (1 + cos(pi q)) / 2 or 1 - sqrt(q), as `optimizer.decay` says (Hu et al. 2024, MiniCPM; Hägele et al. 2024)

    Beyond `total_steps` schedules that end stay where they ended. `own` is the function in their place, where `optimizer.schedule` names one.
    """
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * _RISES[optimizer.warmup]((step + 1) / optimizer.warmup_steps)
    if optimizer.schedule == "constant":
        return optimizer.learning_rate
    since, steps = step - optimizer.warmup_steps, _count_after_warmup(optimizer, total_steps)
    if own is not None:
        return optimizer.learning_rate * own.compute_factor(min(since, steps), steps)
    if optimizer.schedule == "inverse_sqrt":
        timescale = optimizer.timescale or optimizer.warmup_steps or _DEFAULT_TIMESCALE
        return optimizer.learning_rate * math.sqrt(timescale / (timescale + since))
    return optimizer.learning_rate * _factor(optimizer, since, steps)


def _factor(optimizer: OptimizerConfig, since: int, steps: int) -> float:
    """Return the part of the rate `since` steps after the warm-up, of a schedule that ends `steps` steps after it."""
    progress = min(1.0, since / steps)
    if optimizer.schedule in ("linear", "cosine"):
        return _DECAYS[optimizer.schedule](progress)
    if optimizer.schedule == "cosine_with_min":
        falling = _DECAYS["cosine"](progress)
    elif optimizer.schedule == "polynomial":
        falling = (1 - progress) ** optimizer.power
    else:
        assert optimizer.decay_steps is not None, "the configuration refuses wsd without decay_steps"
        decayed = max(0, since - (steps - optimizer.decay_steps)) / optimizer.decay_steps
        falling = _DECAYS[optimizer.decay](min(1.0, decayed))
    return optimizer.min_ratio + (1 - optimizer.min_ratio) * falling


def refuse_impossible_schedule(optimizer: OptimizerConfig, total_steps: int | None) -> None:
    """Raise UnsupportedError for a schedule that ends, where nobody knows when, and for one whose parts take more steps than there are."""
    if total_steps is not None and optimizer.warmup_steps > total_steps:
        raise UnsupportedError(
            f"warm-up takes {optimizer.warmup_steps} steps (optimizer.warmup_steps), and there are {total_steps}",
            remedy="Lower optimizer.warmup_steps, or train for more steps",
        )
    if optimizer.schedule in ("constant", "inverse_sqrt"):
        return
    if total_steps is None:
        needs = "is given the number of steps" if optimizer.names_function else "ends at the last step"
        raise UnsupportedError(
            f'optimizer.schedule = "{optimizer.schedule}" {needs}, and nobody says how many there will be',
            remedy='Give total_steps, set training.steps, or set optimizer.schedule to "constant" or "inverse_sqrt"',
        )
    if optimizer.schedule == "wsd" and optimizer.decay_steps is not None:
        taken = optimizer.warmup_steps + optimizer.decay_steps
        if taken > total_steps:
            raise UnsupportedError(
                f"warm-up and decay take {taken} steps (optimizer.warmup_steps + optimizer.decay_steps), and there are {total_steps}",
                remedy="Lower optimizer.decay_steps or optimizer.warmup_steps, or train for more steps",
            )
