"""The part of a checkpoint that is the RL trainer's own: the ledger, and what is steered from step to step."""

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import frozen

from skyrl_engine.errors import CheckpointError
from skyrl_engine.run.checkpoint import Checkpoint
from skyrl_engine.run.session import TRAINER_DOCUMENT


@frozen
class RlState:
    """`step` steps are done. `ledger` is its `state()`, `kl_coef` the coefficient of the penalty in the reward, if there is one.

    `above` counts steps in a row whose gap was too large, `reference` names the copy that is the reference, and `environments` says the version
    of each by name.
    """

    trainer: str
    step: int
    ledger: Mapping[str, Any]
    kl_coef: float | None
    above: int
    reference: str | None
    environments: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        return attrs.asdict(self)


def state_in(checkpoint: Checkpoint, environments: Mapping[str, str]) -> RlState:
    """Return the state to go on from. Raises CheckpointError where an environment is another than it was."""
    try:
        state = RlState(**checkpoint.document(TRAINER_DOCUMENT))
    except TypeError as error:
        raise CheckpointError(
            f"{checkpoint.path / TRAINER_DOCUMENT} is not of this engine's making ({error})",
            remedy="Resume with the engine version that wrote it",
        ) from error
    if dict(state.environments) != dict(environments):
        changed = sorted(
            name for name in {*state.environments, *environments} if state.environments.get(name) != environments.get(name)
        )
        what = [
            f"{name} ({state.environments.get(name, 'absent')} then, {environments.get(name, 'absent')} now)" for name in changed
        ]
        raise CheckpointError(
            f"the environment has changed since {checkpoint.path} was written: {', '.join(what)}",
            remedy="Resume with the environments the run was started with, or start a new run from an exported model",
        )
    return state
