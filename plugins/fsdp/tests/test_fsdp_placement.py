"""Every rank reads its part of the weights, or rank 0 all of them; what fails on one rank fails on all, and nobody waits for ever."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from fsdp_loading import peak_of_loading, write_deep_model
from fsdp_tasks import outcome, place_model
from transformers import AutoModelForCausalLM

from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.ranks.world import World


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(
    ("whole", "loose", "readers"),
    [(False, False, [False, False]), (True, False, [True, False]), (True, True, [True, True])],
    ids=["each-rank-reads-its-part", "rank-0-reads", "every-rank-reads"],
)
def test_every_rank_has_the_saved_weights_and_buffers(
    pair: World, models: dict[str, str], name: str, whole: bool, loose: bool, readers: list[bool]
) -> None:
    """A model that keeps tensors outside parameters and buffers cannot be filled from elsewhere, so every rank reads it whole."""
    saved = AutoModelForCausalLM.from_pretrained(models[name])
    ranks = pair.run(place_model, models[name], whole=whole, loose=loose)
    assert [reads for reads, *_ in ranks] == readers
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
    for _, empty, weights, _ in pair.run(place_model, str(tmp_path), whole=False):
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


@pytest.mark.proof
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["in-parts", "rank-0-reads"])
def test_no_rank_holds_the_whole_model_while_loading(pair: World, models: dict[str, str], tmp_path: Path, whole: bool) -> None:
    """Each of two ranks holds half of 24 equal layers and, for a moment, a few tensors; rank 0 checks the first two layers.

    Read whole on rank 0, the model takes all of its bytes there, which shows that the measure would see them.
    """
    size = write_deep_model(tmp_path)
    peaks = pair.run(peak_of_loading, str(tmp_path / "model"), small=models["llama-untied"], whole=whole)
    if whole:
        assert peaks[0] > 0.95 * size
    else:
        assert all(0.4 * size < peak < 0.75 * size for peak in peaks), [peak / size for peak in peaks]
