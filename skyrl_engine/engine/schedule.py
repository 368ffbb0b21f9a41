"""The learning rate as a pure function of the step: nothing to save but the step's number."""

import math

from skyrl_engine.config.schema import OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0, of `total_steps`.

    Warm-up: rate * (step + 1) / warmup_steps for the first `warmup_steps` steps, so no step is spent at rate 0. Then, with progress p from
    0 at the first step after the warm-up towards 1 at `total_steps`: constant 1, linear 1 - p, cosine (1 + cos(pi p)) / 2 (Loshchilov and
    Hutter 2017, eq. 5, one cycle). Beyond `total_steps` linear and cosine stay at 0.
    """
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.learning_rate
    progress = min(1.0, (step - optimizer.warmup_steps) / max(1, total_steps - optimizer.warmup_steps))
    factor = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return optimizer.learning_rate * factor
