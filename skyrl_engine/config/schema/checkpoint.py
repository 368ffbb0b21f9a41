"""`[checkpoint]`: writing checkpoints, keeping them, and resuming from one."""

from typing import TYPE_CHECKING, Any, cast

from attrs import field, frozen
from attrs.validators import ge, optional

from skyrl_engine.config.wording import RefusedError
from skyrl_engine.object_store.address import is_address

if TYPE_CHECKING:
    from attrs import Attribute


def _require_address(_instance: object, attribute: "Attribute[Any]", value: str) -> None:
    if not is_address(value):
        raise RefusedError(
            f"{attribute.name} is {value!r}, and no address of an object store",
            "Begin it with a protocol, such as s3:// or file://",
        )


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

    store: str | None = field(default=None, validator=optional(_require_address))
    """Address in an object store, such as `s3://bucket/runs/x`, that holds a copy of the run from each checkpoint on; a run that resumes in a
    directory without a checkpoint is fetched from there. None: the run stays in its directory."""

    resume: bool = False
    """Resume from the latest checkpoint in the run directory, if there is one, or in `store`."""

    allow_changed: tuple[str, ...] = ()
    """Plugins, as `"kind:name"`, that may differ from the ones that wrote the checkpoint."""
