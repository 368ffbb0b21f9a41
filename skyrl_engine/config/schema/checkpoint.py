"""`[checkpoint]`: when to write checkpoints, which to keep, and whether to continue from one."""

from typing import cast

from attrs import field, frozen
from attrs.validators import ge, optional


@frozen
class CheckpointConfig:
    """When to write checkpoints, which to keep, and whether to continue from one."""

    every: int | None = field(default=None, validator=optional(ge(1)))
    """Write a checkpoint every so many optimizer steps; none: only where `at_end` asks."""

    at_end: bool = True
    """Write a checkpoint after the last step."""

    keep: int | None = field(default=cast("int | None", 2), validator=optional(ge(1)))
    """Keep the newest so many checkpoints; none: all."""

    resume: bool = False
    """Continue from the run directory's latest checkpoint, if there is one."""

    allow_changed: tuple[str, ...] = ()
    """Plugins, as `"kind:name"`, that may differ from those the checkpoint was made with."""
