"""The trainer's own part of a checkpoint: where in the run it stands. Everything else a resume needs follows from the configuration."""

from typing import Any

import attrs
from attrs import frozen

from skyrl_engine.errors import CheckpointError
from skyrl_engine.run.checkpoint import Checkpoint
from skyrl_engine.run.session import TRAINER_DOCUMENT
from skyrl_engine.training.order import Position, SampleOrder


@frozen
class TrainerState:
    """`step` optimizer steps are done, and `offset` samples of epoch `epoch` out of `samples`, in the order that `seed` gives."""

    step: int
    epoch: int
    offset: int
    samples: int
    seed: int
    data: str

    @classmethod
    def create(cls, step: int, position: Position, order: SampleOrder, data: str) -> "TrainerState":
        """`data` identifies the training data's content."""
        return cls(step, position.epoch, position.offset, order.samples, order.seed, data)

    def document(self) -> dict[str, Any]:
        return attrs.asdict(self)


def position_in(checkpoint: Checkpoint, order: SampleOrder, data: str) -> Position:
    """Where to go on. Raises CheckpointError when the data is not what the checkpoint was made with: the position would mean other samples."""
    try:
        state = TrainerState(**checkpoint.document(TRAINER_DOCUMENT))
    except TypeError as error:
        raise CheckpointError(
            f"{checkpoint.path / TRAINER_DOCUMENT} is not of this engine's making ({error})",
            remedy="Resume with the engine version that wrote it",
        ) from error
    assert state.step == checkpoint.step, "a checkpoint's name and content disagree"
    if (state.samples, state.data) != (order.samples, data):
        raise CheckpointError(
            f"the training data has changed since {checkpoint.path} was written ({state.samples} samples then, {order.samples} now)",
            remedy="Resume with the data and data settings the run was started with, or start a new run from an exported model",
        )
    return Position(state.epoch, state.offset)
