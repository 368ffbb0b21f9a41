"""`[checkpoint]`: writing checkpoints, keeping them, and resuming from one."""

from typing import cast

from attrs import field, frozen
from attrs.validators import ge, optional


@frozen
class CheckpointConfig:
    """Writing checkpoints, keeping them, and resuming from one."""

    every: int | None = field(default=None, validator=optional(ge(1)))
    """Optimizer steps between two checkpoints; none: no checkpoint before the last step."""

    at_end: bool = True
    """Write a checkpoint after the last step."""

    keep: int | None = field(default=cast("int | None", 2), validator=optional(ge(1)))
    """Number of checkpoints to keep, the newest ones; none: all."""

    asynchronous: bool = False
    """Write checkpoints while training goes on: ranks copy their state to host memory, and a thread of each writes the copy."""

    resume: bool = False
    """Resume from the latest checkpoint in the run directory, if there is one."""

    allow_changed: tuple[str, ...] = ()
    """Plugins, as `"kind:name"`, that may differ from the ones that wrote the checkpoint."""
