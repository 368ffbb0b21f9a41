"""`[evaluation]`: the steps at which to evaluate."""

from attrs import field, frozen
from attrs.validators import ge, lt, optional


@frozen
class EvaluationConfig:
    """The steps at which to evaluate on the held-out data."""

    every: int | None = field(default=None, validator=optional(ge(1)))
    """Optimizer steps between two evaluations; none: only those that the keys below ask for."""

    at_start: bool = False
    """Evaluate before the first step; needs held-out data."""

    at_end: bool = True
    """Evaluate after the last step, if there is held-out data."""

    samples: int = field(default=1, validator=ge(1))
    """Attempts per held-out task, of trainer rl: they give avg@k and pass@k for k up to this number."""

    tasks: int = field(default=64, validator=ge(1))
    """Held-out tasks to attempt in one evaluation, of trainer rl; all where an environment has fewer."""

    temperature: float = field(default=0.0, validator=[ge(0.0), lt(float("inf"))])
    """Temperature to attempt held-out tasks with, of trainer rl; 0 takes the most likely token."""
