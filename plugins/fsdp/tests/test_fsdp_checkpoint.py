"""Saved and loaded equals uninterrupted, bit for bit; what was exported is what was trained."""

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from by_day import rarely
from fsdp_tasks import continue_training, export_weights, load_elsewhere, save_only, start, step_beside_whole, train
from transformers import AutoModelForCausalLM

from skyrl_engine import CheckpointError, ModelError
from skyrl_engine.contracts import (
    AdafactorSettings,
    AdamW8BitSettings,
    AdamWSettings,
    LionSettings,
    ModelConfig,
    MuonSettings,
    OptimizerSettings,
    ParameterGroup,
    RankEnvironment,
    SgdSettings,
)
from skyrl_engine.modeling.eight_bit_steps import has_eight_bit_moments
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.backends.batches import WeightedObjective, build_padded, documents
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.plugin import FsdpConfig

OPTIMIZER = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)
SGD = SgdSettings(learning_rate=0.1, weight_decay=0.1)
EIGHT_BIT = AdamW8BitSettings(learning_rate=1e-2, weight_decay=0.1)
OTHERS = (
    SGD,
    AdafactorSettings(learning_rate=0.05, weight_decay=0.1),
    LionSettings(learning_rate=1e-3, weight_decay=0.1),
    MuonSettings(learning_rate=1e-2, weight_decay=0.1),
    evolve(
        OPTIMIZER, groups=(ParameterGroup("model.layers.0.*", weight_decay=0.0), ParameterGroup("*norm.weight", rate_factor=0.5))
    ),
)


def name_settings(settings: OptimizerSettings) -> str:
    return "groups" if settings.groups else settings.use


def same(uninterrupted: tuple[Any, dict[str, np.ndarray]], resumed: tuple[Any, dict[str, np.ndarray]]) -> None:
    assert uninterrupted[0] == resumed[0]
    assert uninterrupted[1].keys() == resumed[1].keys()
    for name, weight in uninterrupted[1].items():
        np.testing.assert_array_equal(weight, resumed[1][name], err_msg=name)


@pytest.mark.parametrize("name", ["llama-untied", "dropout"])
def test_two_ranks_continue_bit_for_bit(pair: World, models: dict[str, str], tmp_path: Path, name: str) -> None:
    """Losses, norms, rates and weights. The model with dropout shows that random states are part of it."""
    for uninterrupted, resumed in pair.run(continue_training, models[name], OPTIMIZER, tmp_path, before=3, after=2):
        same(uninterrupted, resumed)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("optimizer", [OPTIMIZER, *map(rarely, OTHERS)], ids=name_settings)
def test_one_rank_continues_bit_for_bit(models: dict[str, str], tmp_path: Path, before: int, optimizer: OptimizerSettings) -> None:
    """Also from a checkpoint made before the first step, when AdamW has no state yet."""
    same(*continue_training(models["dropout"], optimizer, tmp_path, before=before, after=2))


@pytest.mark.parametrize("optimizer", OTHERS, ids=name_settings)
def test_two_ranks_continue_bit_for_bit_by_other_optimizers(
    pair: World, models: dict[str, str], tmp_path: Path, optimizer: OptimizerSettings
) -> None:
    for uninterrupted, resumed in pair.run(continue_training, models["dropout"], optimizer, tmp_path, before=2, after=2):
        same(uninterrupted, resumed)


@pytest.mark.parametrize("optimizer", OTHERS, ids=name_settings)
def test_steps_over_divided_weights_are_those_of_whole_ones(
    pair: World, models: dict[str, str], optimizer: OptimizerSettings
) -> None:
    """Bit for bit, and what has a weight's shape is divided as the weight is."""
    for sharded, whole, divided in pair.run(step_beside_whole, models["llama-untied"], optimizer):
        for name, weight in whole.items():
            np.testing.assert_array_equal(sharded[name], weight, err_msg=name)
        assert divided


def test_moments_in_eight_bits_are_those_of_whole_weights_and_go_on_bit_for_bit(
    pair: World, models: dict[str, str], tmp_path: Path
) -> None:
    """All others are stepped by torch's AdamW, which rounds what fills no vector of the processor otherwise: by an ulp, in 1 of 1,500 parts."""
    for sharded, whole, divided in pair.run(step_beside_whole, models["wide"], EIGHT_BIT):
        in_eight_bits = {name for name, weight in whole.items() if has_eight_bit_moments(name, torch.from_numpy(weight))}
        assert in_eight_bits
        for name, weight in whole.items():
            if name in in_eight_bits:
                np.testing.assert_array_equal(sharded[name], weight, err_msg=name)
            else:
                np.testing.assert_array_max_ulp(sharded[name], weight, maxulp=3)
        assert divided
    for uninterrupted, resumed in pair.run(continue_training, models["wide"], EIGHT_BIT, tmp_path, before=2, after=2):
        same(uninterrupted, resumed)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_another_optimizer_is_named(models: dict[str, str], tmp_path: Path) -> None:
    for wrote, reads in ((OPTIMIZER, SGD), (SGD, OPTIMIZER)):
        folder = tmp_path / wrote.use
        folder.mkdir()
        backend = start(models["dropout"], wrote)
        train_loss(backend)
        backend.optim_step()
        backend.save(folder)
        backend.close()
        other, untouched = start(models["dropout"], reads), start(models["dropout"], reads)
        for backend in (other, untouched):
            torch.manual_seed(6)
            train_loss(backend)
            backend.optim_step()
        with pytest.raises(CheckpointError, match="is of another optimizer: ") as raised:
            other.load(folder)
        assert raised.value.remedy == "Set optimizer.use to that of the run that wrote it"
        for backend in (other, untouched):
            torch.manual_seed(7)
            train_loss(backend)
            backend.optim_step()
        for (name, weight), (_, due) in zip(other.weights(), untouched.weights(), strict=True):
            assert torch.equal(weight, due), f"the refused checkpoint changed {name}, or its moments"
        other.close()
        untouched.close()


@pytest.mark.usefixtures("alone")
def test_a_run_goes_on_with_another_pattern_of_frozen_parameters(models: dict[str, str], tmp_path: Path) -> None:
    """Newly frozen parameters lose their moments, those that are no more begin without, and all weights are as saved."""
    patterns = ("model.embed_tokens.*", "model.layers.0.*")
    first = start(models["llama-untied"], OPTIMIZER, freeze=patterns[:1])
    train(first, 2)
    first.save(tmp_path)
    saved = {name: weight.clone() for name, weight in first.weights()}
    second = start(models["llama-untied"], OPTIMIZER, freeze=patterns[1:])
    second.load(tmp_path)
    assert {name for name, weight in second.weights() if torch.equal(weight, saved[name])} == saved.keys()
    state = {name: second._optimizer.state.get(parameter) for name, parameter in second._model.named_parameters()}
    assert {name for name, moments in state.items() if moments} == {
        name for name in saved if name != "model.embed_tokens.weight" and not name.startswith("model.layers.0.")
    }
    train(first, 1)
    train(second, 1)
    moved = {name: not torch.equal(weight, saved[name]) for name, weight in second.weights()}
    assert moved == {name: not name.startswith("model.layers.0.") for name in saved}
    first.close()
    second.close()


def test_dropout_differs_without_the_random_states(models: dict[str, str], alone: None) -> None:
    """The tests above could not fail if the dropout model drew nothing."""
    backend = start(models["dropout"])
    losses = {train_loss(backend) for _ in range(2)}
    assert len(losses) == 2


def train_loss(backend: Any) -> float:
    return float(backend.forward_backward(build_padded(documents(), 8), WeightedObjective()).metrics["loss"].value)


@pytest.mark.usefixtures("alone")
def test_scoring_alone_takes_the_weights_of_any_number_of_ranks(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """An export on one rank needs this. The two ranks took one AdamW step, which moves no weight by much more than the learning rate, 1e-5."""
    pair.run(save_only, models["qwen3-tied"], tmp_path)
    backend = FsdpBackend(FsdpConfig())
    backend.setup(ModelConfig(models["qwen3-tied"]), None, RankEnvironment(0, 1, "cpu", 0))
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    with torch.no_grad():
        for parameter in backend._model.parameters():
            parameter.zero_()
    backend.load(tmp_path)
    loaded = dict(backend.weights())
    assert loaded.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(loaded[name], tensor, atol=1.1e-5, rtol=0)
    assert any(not torch.equal(loaded[name], tensor) for name, tensor in before.items())
    backend.close()


@pytest.mark.usefixtures("alone")
def test_unusable_checkpoints_are_named(models: dict[str, str], tmp_path: Path) -> None:
    save_only(models["qwen3-tied"], tmp_path)
    with pytest.raises(CheckpointError, match=r"of another model: .*lm_head"):
        load_elsewhere(models["qwen3-untied"], tmp_path)
    (tmp_path / "random-0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"rank 0 cannot read the checkpoint"):
        load_elsewhere(models["qwen3-tied"], tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank 0 cannot read the checkpoint"):
        load_elsewhere(models["qwen3-tied"], tmp_path)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("place", ["shards", "random states"])
def test_a_full_disk_is_a_checkpoint_error(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    backend = start(models["qwen3-tied"])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if place == "shards":
        monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    else:
        monkeypatch.setattr("skyrl_engine_fsdp.checkpoint.torch.save", full)
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write .*No space left on device") as caught:
        backend.save(tmp_path)
    assert "Make room" in caught.value.remedy
    monkeypatch.undo()
    train(backend, 1)  # nothing is lost


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
def test_the_export_is_what_was_trained(pair: World, models: dict[str, str], tmp_path: Path, name: str) -> None:
    """Weights equal bit for bit, and transformers' logits give the backend's log-probabilities."""
    (weights, logprobs), (other_weights, _) = pair.run(export_weights, models[name], tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert loaded.config.tie_word_embeddings == name.endswith("-tied")
    assert dict(loaded.named_parameters()).keys() == weights.keys() == other_weights.keys()
    for key, parameter in loaded.named_parameters():
        np.testing.assert_array_equal(weights[key], parameter.detach().numpy(), err_msg=key)
        np.testing.assert_array_equal(weights[key], other_weights[key])
    start_weights = AutoModelForCausalLM.from_pretrained(models[name]).state_dict()
    assert not np.array_equal(start_weights["model.embed_tokens.weight"].numpy(), weights["model.embed_tokens.weight"])
    row = documents()[0]
    with torch.no_grad():
        expected = loaded(input_ids=row.ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, row.ids[1:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected[row.weights[1:] != 0].numpy(), atol=1e-5)
    assert expected.shape[0] == 15
    assert loaded.config.vocab_size == VOCABULARY


@pytest.mark.usefixtures("alone")
def test_an_export_that_cannot_be_written_is_a_model_error(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = start(models["qwen3-tied"])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel.save_pretrained", full)
    with pytest.raises(ModelError, match="No space left on device"):
        backend.export(tmp_path)
