"""Rank 0 reads the weights, every rank has them; what fails on one rank fails on all, and nobody waits for ever."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from fsdp_tasks import outcome, place_model
from transformers import AutoModelForCausalLM

from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.ranks.world import World


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("loose", [False, True], ids=["rank-0-reads", "every-rank-reads"])
def test_every_rank_has_the_saved_weights_and_buffers(pair: World, models: dict[str, str], name: str, loose: bool) -> None:
    """A model that keeps tensors outside parameters and buffers cannot be filled from rank 0, so every rank reads it."""
    saved = AutoModelForCausalLM.from_pretrained(models[name])
    ranks = pair.run(place_model, models[name], loose=loose)
    assert [reads for reads, *_ in ranks] == [True, loose]
    for _, empty, weights, buffers in ranks:
        assert empty == []
        assert weights.keys() == dict(saved.named_parameters()).keys()
        for key, parameter in saved.named_parameters():
            np.testing.assert_array_equal(weights[key], parameter.detach().numpy())
        assert buffers.keys() == dict(saved.named_buffers()).keys()
        for key, buffer in saved.named_buffers():
            np.testing.assert_array_equal(buffers[key], buffer.numpy())


def test_a_parameter_with_names_inside_and_outside_of_what_is_sharded(pair: World, tmp_path: Path) -> None:
    """BERT's head holds the bias of its linear layer a second time, outside the part of the model that is sharded."""
    write_model(tmp_path, "bert-generation")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    for _, empty, weights, _ in pair.run(place_model, str(tmp_path), loose=False):
        assert empty == []
        for key, parameter in saved.named_parameters():
            np.testing.assert_array_equal(weights[key], parameter.detach().numpy())


def test_an_error_of_the_reading_rank_is_every_ranks_error(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(models["qwen3-tied"], directory)
    os.truncate(directory / "model.safetensors", 100)
    first, second = pair.run(outcome, str(directory))
    assert first == second
    assert "model.safetensors is damaged" in first
    assert pair.run(outcome, models["qwen3-tied"]) == ["set up", "set up"]
