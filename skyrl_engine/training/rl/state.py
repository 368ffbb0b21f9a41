"""The part of a checkpoint that is the RL trainer's own: the ledger, and what is steered from step to step."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from skyrl_engine.errors import CheckpointError
from skyrl_engine.run.checkpoint import Checkpoint
from skyrl_engine.run.session import TRAINER_DOCUMENT

logger = logging.getLogger(__name__)


@frozen
class RlState:
    """`step` steps are done. `ledger` is its `state()`, `kl_coef` the coefficient of the penalty in the reward, if there is one.

    `above` counts steps in a row whose gap was too large, `reference` names the copy that is the reference, and `environments` says the version
    of each by name. `journal` is the run that the journal of rollouts names, and `segments` are the bytes of each of its segments by name, on
    which the checkpoint counts; None where there is none. `idle` counts steps in a row whose gradient was 0. `entropy_coef` and `entropy`
    are the steered coefficient of the entropy bonus and the entropy that was measured last, None where there are none.
    """

    trainer: str
    step: int
    ledger: Mapping[str, Any]
    kl_coef: float | None
    above: int
    reference: str | None
    environments: Mapping[str, str]
    journal: str | None = None
    segments: Mapping[str, int] | None = None
    idle: int = 0
    entropy_coef: float | None = None
    entropy: float | None = None

    def document(self) -> dict[str, Any]:
        return attrs.asdict(self)


def state_in(
    checkpoint: Checkpoint, environments: Mapping[str, str], *, permissions: Mapping[str, str], allow_changed: Sequence[str] = ()
) -> RlState:
    """Return the state to go on from.

    `environments` are the versions now, `permissions` what `checkpoint.allow_changed` calls each of them ("environment:name"). Raises
    CheckpointError where an environment is another than it was and `allow_changed` does not name it.
    """
    try:
        state = RlState(**checkpoint.document(TRAINER_DOCUMENT))
    except TypeError as error:
        raise CheckpointError(
            f"{checkpoint.path / TRAINER_DOCUMENT} is not of this engine's making ({error})",
            remedy="Resume with the engine version that wrote it",
        ) from error
    changed = {
        name: f"{name} ({state.environments.get(name, 'absent')} then, {environments.get(name, 'absent')} now)"
        for name in sorted({*state.environments, *environments})
        if state.environments.get(name) != environments.get(name)
    }
    refused = [name for name in changed if permissions.get(name) not in allow_changed]
    if refused:
        permission = ", ".join(f'"{permissions[name]}"' for name in refused if name in permissions)
        raise CheckpointError(
            f"the environment has changed since {checkpoint.path} was written: {', '.join(changed[name] for name in refused)}",
            remedy="Resume with the environments the run was started with"
            + (f", or set checkpoint.allow_changed = [{permission}] to resume inexactly" if permission else ""),
        )
    for difference in changed.values():
        logger.warning("differs from the checkpoint, so the run no longer equals an uninterrupted one: %s", difference)
    return state
