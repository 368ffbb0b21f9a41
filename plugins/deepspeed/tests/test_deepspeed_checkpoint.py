"""Saved and loaded equals uninterrupted, bit for bit, and to rounding in another stage; what was exported is what was trained."""

import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import rarely
from deepspeed_tasks import (
    VOCABULARY,
    continued,
    exported,
    load_and_train,
    load_in_training,
    save_after_a_step,
    scored,
    start,
    train,
)
from transformers import AutoModelForCausalLM

from skyrl_engine import CheckpointError, ModelError
from skyrl_engine.testing.ranks.world import World


def same(uninterrupted: tuple[Any, dict[str, np.ndarray]], resumed: tuple[Any, dict[str, np.ndarray]]) -> None:
    assert uninterrupted[0] == resumed[0]
    assert uninterrupted[1].keys() == resumed[1].keys()
    for name, weight in uninterrupted[1].items():
        np.testing.assert_array_equal(weight, resumed[1][name], err_msg=name)


@pytest.mark.proof
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_continues_bit_for_bit(pair: World, models: dict[str, str], tmp_path: Path, stage: int) -> None:
    """The model with dropout shows that random states are part of it."""
    for uninterrupted, resumed in pair.run(
        continued, models["dropout"], stage, tmp_path, before=2, after=2, dtype="bfloat16", threshold=1000
    ):
        same(uninterrupted, resumed)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_of_before_the_first_step_continues_too(models: dict[str, str], tmp_path: Path, stage: int) -> None:
    """Then AdamW has no state yet, and the loading backend has some that must go."""
    same(*continued(models["dropout"], stage, tmp_path, before=0, after=2))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("stage", "later"), [(0, 3), (3, 1), (2, 0)])
def test_any_stage_continues_what_another_wrote(models: dict[str, str], tmp_path: Path, stage: int, later: int) -> None:
    """Stages add up the norm in another order: equal to rounding, which a lost moment (1e-2 a step) is far from."""
    uninterrupted, resumed = continued(models["llama"], stage, tmp_path, before=2, after=2, later_stage=later)
    np.testing.assert_allclose(uninterrupted[0], resumed[0], rtol=1e-6)
    for name, weight in uninterrupted[1].items():
        np.testing.assert_allclose(weight, resumed[1][name], rtol=0, atol=1e-5, err_msg=name)


def test_two_ranks_continue_in_another_stage(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """Stages sum in another order: equal to float32's rounding, which a lost moment (1e-2 a step) is far from."""
    for uninterrupted, resumed in pair.run(continued, models["qwen3"], 2, tmp_path, before=2, after=2, later_stage=3):
        for name, weight in uninterrupted[1].items():
            np.testing.assert_allclose(weight, resumed[1][name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("stage", "later"), [(3, 1), rarely(2, 3), rarely(0, 2)])
def test_another_number_of_ranks_continues_to_rounding(
    pair: World, models: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, stage: int, later: int
) -> None:
    """Two ranks wrote and one goes on, one wrote and two go on. A lost moment is 1e-2 a step; AdamW makes rounding up to 1e-4."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    by_two = pair.run(continued, models["qwen3"], stage, tmp_path / "two", before=2, after=2)[0][0][1]
    with caplog.at_level(logging.WARNING):
        by_one = load_and_train(models["qwen3"], later, tmp_path / "two", steps=2)
    assert "is of 2 ranks, this run has 1" in caplog.text
    continued(models["qwen3"], stage, tmp_path / "one", before=2, after=0)
    by_two_again = pair.run(load_and_train, models["qwen3"], later, tmp_path / "one", steps=2)[0]
    for name, weight in by_two.items():
        np.testing.assert_allclose(by_one[name], weight, rtol=0, atol=1e-3, err_msg=name)
        np.testing.assert_allclose(by_two_again[name], weight, rtol=0, atol=1e-3, err_msg=name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("stage", "between"), [(3, 2), rarely(2, 3), rarely(1, 0)])
def test_state_passes_through_another_number_of_ranks_bit_for_bit(
    pair: World, models: dict[str, str], tmp_path: Path, stage: int, between: int
) -> None:
    """Two ranks wrote, one read it and wrote it again, two go on: weights, moments and counts of steps are those of two that never stopped."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (_, due), _ = pair.run(continued, models["qwen3"], stage, tmp_path / "two", before=2, after=2)[0]
    load_and_train(models["qwen3"], between, tmp_path / "two", steps=0, saves_to=tmp_path / "one")
    for weights in pair.run(load_and_train, models["qwen3"], stage, tmp_path / "one", steps=2):
        assert weights.keys() == due.keys()
        for name, weight in due.items():
            np.testing.assert_array_equal(weights[name], weight, err_msg=name)


def test_random_states_start_anew_on_another_number_of_ranks(
    pair: World, models: dict[str, str], tmp_path: Path, alone: None
) -> None:
    """From the run's seed, the step and the rank, whatever was drawn before: resumed twice, a model with dropout trains the same."""
    pair.run(save_after_a_step, models["dropout"], 2, tmp_path)
    first, again = (load_and_train(models["dropout"], 2, tmp_path, steps=1, drawn=drawn) for drawn in (0, 7))
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, again[name], err_msg=name)


@pytest.mark.usefixtures("alone")
def test_another_number_of_ranks_scores(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """In the precision that computes: a model that only scores holds no more."""
    weights, _ = pair.run(save_after_a_step, models["qwen3"], 3, tmp_path, dtype="bfloat16")
    for dtype in ("float32", "bfloat16"):
        _, loaded = scored(models["qwen3"], tmp_path, dtype=dtype)
        assert loaded.keys() == weights.keys()
        for name, weight in weights.items():
            held = torch.from_numpy(weight).to(getattr(torch, dtype)).float().numpy()
            np.testing.assert_array_equal(loaded[name], held, err_msg=name)


def test_a_file_that_one_rank_lacks_is_every_ranks_error(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """Nobody waits for the other."""
    pair.run(save_after_a_step, models["qwen3"], 2, tmp_path)
    (tmp_path / "rank-1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint"):
        pair.run(load_in_training, models["qwen3"], 2, tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_continue_beside_frozen_parameters_and_refuse_others(
    pair: World, models: dict[str, str], tmp_path: Path, stage: int
) -> None:
    """Bit for bit; AdamW's count of steps is of all that are trained together, so that what is trained from now on has no place in it."""
    freeze = ("model.embed_tokens.*", "model.layers.0.*")
    for uninterrupted, resumed in pair.run(continued, models["llama"], stage, tmp_path, before=2, after=2, freeze=freeze):
        same(uninterrupted, resumed)
    with pytest.raises(CheckpointError, match=r"another model\.freeze: model\.embed_tokens\.weight is frozen in one of the two"):
        pair.run(load_in_training, models["llama"], stage, tmp_path)


@pytest.mark.usefixtures("alone")
def test_unusable_checkpoints_are_named(models: dict[str, str], tmp_path: Path) -> None:
    save_after_a_step(models["qwen3"], 2, tmp_path)
    with pytest.raises(CheckpointError, match=r"of another model: lm_head.weight is not in both"):
        load_in_training(models["llama"], 2, tmp_path)
    (tmp_path / "rank-0.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"rank 0 cannot read the checkpoint"):
        load_in_training(models["qwen3"], 2, tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank 0 cannot read the checkpoint"):
        load_in_training(models["qwen3"], 2, tmp_path)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("cause", ["checkpoint", "export"])
def test_a_full_disk_is_named_and_nothing_is_lost(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    backend = start(models["qwen3"])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("skyrl_engine_deepspeed.checkpoint.torch.save", full)
    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel.save_pretrained", full)
    write, error = (backend.save, CheckpointError) if cause == "checkpoint" else (backend.export, ModelError)
    with pytest.raises(error, match="No space left on device") as caught:
        write(tmp_path)
    assert "Make room" in caught.value.remedy
    monkeypatch.undo()
    train(backend, 1)
    backend.close()


@pytest.mark.parametrize(
    ("name", "stage", "dtype"), [("qwen3", 3, "bfloat16"), ("llama", 1, "bfloat16"), ("qwen3_moe", 3, "float32")]
)
def test_the_export_is_what_was_trained(
    pair: World, models: dict[str, str], tmp_path: Path, name: str, stage: int, dtype: str
) -> None:
    """Weights have the run's precision, and are the trained ones, rounded to it."""
    weights, other_weights = pair.run(exported, models[name], stage, tmp_path, dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.config.tie_word_embeddings == (name == "qwen3")
    assert dict(loaded.named_parameters()).keys() == weights.keys() == other_weights.keys()
    for key, parameter in loaded.named_parameters():
        rounded = torch.from_numpy(weights[key]).to(loaded.dtype)
        assert torch.equal(rounded, parameter), key
    before = dict(AutoModelForCausalLM.from_pretrained(models[name]).named_parameters())
    assert not np.array_equal(before["model.embed_tokens.weight"].detach().numpy(), weights["model.embed_tokens.weight"])
    assert loaded.config.vocab_size == VOCABULARY
