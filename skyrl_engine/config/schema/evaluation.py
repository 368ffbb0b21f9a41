"""`[evaluation]`: the steps at which to evaluate."""

from attrs import field, frozen
from attrs.validators import ge, optional


@frozen
class EvaluationConfig:
    """The steps at which to evaluate on the held-out data."""

    every: int | None = field(default=None, validator=optional(ge(1)))
    """Optimizer steps between two evaluations; none: only those that the keys below ask for."""

    at_start: bool = False
    """Evaluate before the first step; needs held-out data."""

    at_end: bool = True
    """Evaluate after the last step, if there is held-out data."""
