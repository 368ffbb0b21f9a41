"""The state that a trainer over a dataset writes into a checkpoint: its place in the run. The configuration says the rest."""

import hashlib
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from attrs import frozen

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.pairs import roles_in
from skyrl_engine.contracts.values.roles import ROLE
from skyrl_engine.data.streaming.stream import StreamPosition
from skyrl_engine.errors import CheckpointError
from skyrl_engine.run.checkpoint import Checkpoint
from skyrl_engine.run.resume_checks import OLDER_RULE, has_older_rule
from skyrl_engine.run.session import CONFIG_DOCUMENT, TRAINER_DOCUMENT
from skyrl_engine.training.sft.order import Position, SampleOrder

DataPosition = Position | StreamPosition
"""A place between two mini-batches, of a table or of a stream."""


@frozen
class SftState:
    """`step` optimizer steps are done, and `offset` samples of epoch `epoch` out of `samples`, in the order that `seed` gives.

    `data` is the training data's `fingerprint`, `reference` the name of the copy that is the reference, `draws` how many of an epoch are from
    each dataset; None where these have no weights. `stream` is the position in data that is streamed, of which `offset` rows were drawn.
    """

    trainer: str
    step: int
    epoch: int
    offset: int
    samples: int
    seed: int
    data: str
    reference: str | None = None
    draws: list[int] | None = None
    stream: Mapping[str, Any] | None = None

    @classmethod
    def create(
        cls, trainer: str, step: int, position: DataPosition, order: SampleOrder, data: str, *, reference: str | None = None
    ) -> "SftState":
        if isinstance(position, StreamPosition):
            rows, place = position.rows, position.document()
            return cls(trainer, step, position.epoch, rows, 0, order.seed, data, reference, stream=place)
        return cls(trainer, step, position.epoch, position.offset, order.samples, order.seed, data, reference, draws_of(order))

    @property
    def position(self) -> DataPosition:
        """The place in the sample order, or in the stream, to go on from."""
        if self.stream is not None:
            return StreamPosition.of(self.stream)
        return Position(self.epoch, self.offset)

    def document(self) -> dict[str, Any]:
        return attrs.asdict(self)


def state_in(
    checkpoint: Checkpoint, order: SampleOrder, data: str, *, split_by_seed: bool = False, streamed: bool = False
) -> SftState:
    """Return the state to go on from. `split_by_seed` says that the seed chooses which samples are held out, `streamed` that the data is read
    while training.

    Raises CheckpointError when the data is not what the checkpoint was made with: the position would mean other samples.
    """
    try:
        state = SftState(**checkpoint.document(TRAINER_DOCUMENT))
    except TypeError as error:
        raise CheckpointError(
            f"{checkpoint.path / TRAINER_DOCUMENT} is not of this engine's making ({error})",
            remedy="Resume with the engine version that wrote it",
        ) from error
    assert state.step == checkpoint.step, "a checkpoint's name and content disagree"
    if state.data != data and split_by_seed and state.seed != order.seed:
        raise CheckpointError(
            f"run.seed is {order.seed}, and {checkpoint.path} was written with {state.seed}: with data.eval_fraction the seed chooses "
            "which samples are held out, so the run would train on samples that were held out before",
            remedy=f"Set run.seed = {state.seed}, or start a new run from an exported model",
        )
    if streamed:
        _refuse_other_stream(checkpoint, state, order, data)
        return state
    if state.data == data and state.draws != draws_of(order):
        raise CheckpointError(
            f"{checkpoint.path} was written with other data.weights: an epoch took {_format_draws(state.draws)} draws of the datasets, and "
            f"would now take {_format_draws(draws_of(order))}",
            remedy="Resume with the data.weights and data.stopping_strategy that the run was started with, or start a new run from an exported "
            "model",
        )
    if (state.samples, state.data) != (order.samples, data):
        if _has_older_rule(checkpoint):
            raise CheckpointError(
                f"{checkpoint.path} was written for other tokens than the data becomes now: {OLDER_RULE}",
                remedy='Set data.template = "none" to go on as the run began, or start a new run from an exported model',
            )
        raise CheckpointError(
            f"the training data has changed since {checkpoint.path} was written ({state.samples} samples then, {order.samples} now)",
            remedy="Resume with the data and data settings the run was started with, or start a new run from an exported model",
        )
    return state


def _refuse_other_stream(checkpoint: Checkpoint, state: SftState, order: SampleOrder, data: str) -> None:
    """Refuse a position in another stream."""
    if state.seed != order.seed:
        raise CheckpointError(
            f"run.seed is {order.seed}, and {checkpoint.path} was written with {state.seed}: the seed decides the order of a stream, so the "
            "position would mean other rows",
            remedy=f"Set run.seed = {state.seed}, or start a new run from an exported model",
        )
    if state.stream is None or state.data != data:
        raise CheckpointError(
            f"the training data, or a setting that decides the order of the stream, has changed since {checkpoint.path} was written",
            remedy="Resume with the shards, their sizes and the table [data] that the run was started with, or start a new run from an "
            "exported model",
        )


def draws_of(order: SampleOrder) -> list[int] | None:
    """Return how many draws of an epoch are from each dataset; None where these have no weights."""
    return None if order.mixture is None else list(order.mixture.draws)


def _format_draws(draws: list[int] | None) -> str:
    return "each sample once" if draws is None else " and ".join(map(str, draws))


def _has_older_rule(checkpoint: Checkpoint) -> bool:
    try:
        return has_older_rule(checkpoint.document(CONFIG_DOCUMENT).get("data"))
    except CheckpointError:
        return False


def fingerprint(columns: SampleColumns) -> str:
    """SHA-256 of the samples themselves: tokens, boundaries, loss weights, ids, columns and extras. The same however they came to be."""
    digest = hashlib.sha256()
    arrays = {
        "input_ids": columns.input_ids,
        "token_offsets": columns.token_offsets,
        "action_offsets": columns.action_offsets,
        "loss_weight": columns.loss_weight,
        "sample_ids": columns.sample_ids,
        "group_ids": columns.group_ids,
        "unit_ids": columns.unit_ids,
        **columns.columns,
    }
    if (roles := roles_in(columns.sample_values)) is not None:
        arrays[ROLE] = roles
    for name, array in arrays.items():
        digest.update(f"{name}:{array.dtype.str}:{len(array)};".encode())
        digest.update(np.ascontiguousarray(array).data)
    for name, view in sorted(columns.extras.items()):
        digest.update(f"{name}:{view.values.dtype.str}:{view.values.shape[1:]};".encode())
        digest.update(view.lengths.data)
        for sample in range(len(view)):
            digest.update(np.ascontiguousarray(view[sample]).data)
    return digest.hexdigest()
