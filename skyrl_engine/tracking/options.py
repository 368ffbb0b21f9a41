"""Options that every tracker has."""

from attrs import field, frozen
from attrs.validators import ge, gt, lt


@frozen(kw_only=True)
class TrackerOptions:
    """Options that every tracker has. A tracker's own options are a subclass."""

    finish_seconds: float = field(default=60.0, validator=[gt(0.0), lt(float("inf"))])
    """Longest time in seconds that the end of a run waits for the tracker, whose thread may be behind; what is left then is missing there."""

    table_every: int = field(default=10, validator=ge(0))
    """Steps of `rl` from one table of attempts to the next, beginning with step 1; 0: no tables."""

    table_rows: int = field(default=8, validator=ge(1))
    """Attempts in a table: one of every group in turn."""
