"""The position in a checkpoint means the same samples, or the resume is refused."""

from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.errors import CheckpointError
from skyrl_engine.run.checkpoint import Checkpoint, CheckpointStore
from skyrl_engine.training.sft.order import Position, SampleOrder
from skyrl_engine.training.sft.state import SftState, fingerprint, state_in

ORDER = SampleOrder(samples=10, batch_size=4, seed=3)


def save(directory: Path, state: SftState) -> Checkpoint:
    return CheckpointStore(directory).save(state.step, lambda _: None, {"trainer.json": state.document()})


def test_the_position_comes_back(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, SftState.create("sft", 5, Position(1, 8), ORDER, "abc"))
    assert state_in(checkpoint, ORDER, "abc").position == Position(1, 8)
    # A position counts samples, so that it keeps its meaning when the batch size changes.
    assert state_in(checkpoint, evolve(ORDER, batch_size=2), "abc").position == Position(1, 8)


def test_other_data_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, SftState.create("sft", 5, Position(1, 8), ORDER, "abc"))
    with pytest.raises(CheckpointError, match="the training data has changed"):
        state_in(checkpoint, ORDER, "abd")
    with pytest.raises(CheckpointError, match="10 samples then, 11 now"):
        state_in(checkpoint, evolve(ORDER, samples=11), "abc")


def test_texts_that_were_trained_as_they_stood_are_refused_with_the_key(tmp_path: Path) -> None:
    """A configuration without `data.template` is of an engine that trained texts raw; one that has the key knows what it does."""
    for data, message in (
        ({"train": "a.jsonl"}, r'before 0\.3.*Set data\.template = "none"'),
        ({"template": "auto"}, "has changed"),
    ):
        state = SftState.create("sft", 5, Position(1, 8), ORDER, "abc")
        documents = {"trainer.json": state.document(), "config.json": {"data": data}}
        checkpoint = CheckpointStore(tmp_path / message[:3]).save(5, lambda _: None, documents)
        with pytest.raises(CheckpointError, match=message):
            state_in(checkpoint, ORDER, "abd")
        assert state_in(checkpoint, ORDER, "abc").position == Position(1, 8)


def test_a_changed_seed_is_named_where_it_chooses_the_held_out_samples(tmp_path: Path) -> None:
    """The data itself is as it was; as many samples are left, but others."""
    checkpoint = save(tmp_path, SftState.create("sft", 5, Position(1, 8), ORDER, "abc"))
    other = evolve(ORDER, seed=4)
    with pytest.raises(
        CheckpointError, match=r"run\.seed is 4, and .* was written with 3: with data\.eval_fraction .* Set run\.seed = 3"
    ):
        state_in(checkpoint, other, "abd", split_by_seed=True)
    with pytest.raises(CheckpointError, match="the training data has changed"):
        state_in(checkpoint, other, "abd", split_by_seed=False)
    assert state_in(checkpoint, other, "abc", split_by_seed=True).position == Position(1, 8)


def test_a_state_of_another_making_is_refused(tmp_path: Path) -> None:
    checkpoint = CheckpointStore(tmp_path).save(5, lambda _: None, {"trainer.json": {"step": 5, "mood": "good"}})
    with pytest.raises(CheckpointError, match=r"trainer\.json is not of this engine's making"):
        state_in(checkpoint, ORDER, "abc")


def test_the_fingerprint_sees_every_part_of_the_samples() -> None:
    def columns(ids: list[int], lengths: list[int], actions: list[int], weight: list[int]) -> SampleColumns:
        return SampleColumns.create(
            input_ids=np.array(ids, dtype=np.int32),
            token_offsets=offsets_of(lengths),
            action_offsets=offsets_of(actions),
            loss_weight=np.array(weight, dtype=np.uint8),
        )

    variants = [
        columns([1, 2, 3, 4], [2, 2], [1, 1], [1, 1]),
        columns([1, 2, 3, 5], [2, 2], [1, 1], [1, 1]),
        columns([1, 2, 3, 4], [3, 1], [1, 1], [1, 1]),
        columns([1, 2, 3, 4], [2, 2], [1, 1], [1, 0]),
        columns([1, 2, 3, 4], [2, 2], [2, 0], [1, 1]),
    ]
    assert len({fingerprint(variant) for variant in variants}) == len(variants)
    assert fingerprint(variants[0]) == fingerprint(variants[0].take([0, 1]))


def test_the_fingerprint_sees_what_samples_carry_and_not_how_it_lies_in_memory() -> None:
    def columns(*pixels: float) -> SampleColumns:
        patches = np.array(pixels, dtype=np.float32).reshape(2, 2)
        grids = [np.array([[1, 1, 1]], dtype=np.int64)] * 2
        return SampleColumns.from_lists(
            input_ids=[[1, 2], [3, 4]],
            extras={"pixel_values": [patches[:1], patches[1:]], "image_grid_thw": grids, "mm_token_type_ids": [[1, 0], [1, 0]]},
        )

    assert fingerprint(columns(0, 1, 2, 3)) != fingerprint(columns(0, 1, 2, 4))
    assert fingerprint(columns(0, 1, 2, 3)) == fingerprint(columns(0, 1, 2, 3).take([0, 1]))
    assert fingerprint(columns(0, 1, 2, 3).take([1, 0])) != fingerprint(columns(0, 1, 2, 3))
