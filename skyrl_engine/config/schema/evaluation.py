"""`[evaluation]`: when to evaluate."""

from attrs import field, frozen
from attrs.validators import ge, optional


@frozen
class EvaluationConfig:
    """When to evaluate on the held-out data."""

    every: int | None = field(default=None, validator=optional(ge(1)))
    """Evaluate every so many optimizer steps; none: only where the keys below ask."""

    at_start: bool = False
    """Evaluate before the first step."""

    at_end: bool = True
    """Evaluate after the last step, if there is held-out data."""
