"""Saved and loaded equals uninterrupted, bit for bit in one layout and to rounding in another; what was exported is what was trained."""

import errno
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import now
from megatron_tasks import (
    VOCABULARY,
    continue_training,
    export_weights,
    resume_checkpoint,
    round_on_ranks,
    save_checkpoint,
    set_up,
    weights_of,
)
from transformers import AutoModelForCausalLM

from skyrl_engine import CheckpointError, ModelError
from skyrl_engine.contracts import AdamWSettings
from skyrl_engine.testing.backends.batches import Arrays, definition, documents
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.plugin import MegatronConfig

OPTIMIZER = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)
LAYOUTS = {
    "tp2": MegatronConfig(tensor_parallel=2),
    "cp2": MegatronConfig(context_parallel=2),
    "pp2": MegatronConfig(pipeline_parallel=2),
    "pp2-interleaved": MegatronConfig(pipeline_parallel=2, virtual_pipeline=2),
    "dp2": MegatronConfig(),
    "dp2-whole-optimizer": MegatronConfig(distributed_optimizer=False),
}


def same(uninterrupted: tuple[Any, Arrays], resumed: tuple[Any, Arrays]) -> None:
    assert uninterrupted[0] == resumed[0]
    assert uninterrupted[1].keys() == resumed[1].keys()
    for name, weight in uninterrupted[1].items():
        np.testing.assert_array_equal(weight, resumed[1][name], err_msg=name)


@pytest.mark.parametrize("layout", now(LAYOUTS, "dp2"))
def test_two_ranks_continue_bit_for_bit(pair: World, models: dict[str, str], tmp_path: Path, layout: str) -> None:
    """Losses, norms, rates and weights."""
    for uninterrupted, again in pair.run(
        continue_training, models["qwen3-tied"], LAYOUTS[layout], OPTIMIZER, tmp_path, before=3, after=2
    ):
        same(uninterrupted, again)


@pytest.mark.nightly
def test_bfloat16_continues_from_unrounded_weights(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    options = {"before": 2, "after": 2, "dtype": "bfloat16"}
    for uninterrupted, again in pair.run(continue_training, models["llama-untied"], LAYOUTS["dp2"], OPTIMIZER, tmp_path, **options):
        same(uninterrupted, again)
        assert {weight.dtype for weight in again[1].values()} == {np.dtype(np.float32)}
        matrix = again[1]["model.layers.0.mlp.up_proj.weight"]
        assert not np.array_equal(torch.from_numpy(matrix).bfloat16().float().numpy(), matrix)


@pytest.mark.parametrize("layout", now(["dp2", "tp2", "pp2-interleaved"], "dp2"))
def test_weights_on_their_way_are_rounded_where_they_lie(pair: World, models: dict[str, str], layout: str) -> None:
    """In bfloat16 the parameters that compute are what masters were rounded to: the bits of rounding what was gathered."""
    for due, rounded in pair.run(round_on_ranks, models["llama-untied"], LAYOUTS[layout], "bfloat16"):
        assert list(rounded) == list(due)
        for name, weight in due.items():
            np.testing.assert_array_equal(rounded[name], weight, err_msg=name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("before", now([0, 2], 0))
def test_one_rank_continues_bit_for_bit(models: dict[str, str], tmp_path: Path, before: int) -> None:
    """Also from a checkpoint made before the first step, when AdamW has no state yet."""
    same(*continue_training(models["llama-untied"], MegatronConfig(), OPTIMIZER, tmp_path, before=before, after=2))


@pytest.mark.proof
@pytest.mark.usefixtures("alone")
def test_another_layout_continues(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    """From tensor-parallel over pipeline, data-parallel and back, and to one rank: the same training, in another order of sums.

    An epsilon of AdamW as large as the gradients makes steps follow them; else the sign of a gradient near 0 would decide.
    """
    smooth = AdamWSettings(learning_rate=1e-2, epsilon=1.0, weight_decay=0.1)
    name = models["qwen3-tied"]
    chain = [LAYOUTS[layout] for layout in ("tp2", "pp2-interleaved", "dp2", "dp2-whole-optimizer", "cp2", "tp2")]
    for number, (first, second) in enumerate(pairwise(chain)):
        checkpoint = tmp_path / str(number)
        checkpoint.mkdir()
        expected = pair.run(save_checkpoint, name, first, smooth, checkpoint, before=2, after=2)
        close(expected, pair.run(resume_checkpoint, name, second, smooth, checkpoint, after=2))
        if number == 0:
            close(expected, [resume_checkpoint(name, MegatronConfig(), smooth, checkpoint, after=2)])


def close(expected: list[Any], ranks: list[Any]) -> None:
    """Rates, norms and weights of every rank are those of the first; losses add up over ranks where the layout has any."""
    (reference, weights), *_ = expected
    for history, reached in ranks:
        for (_, norm, rate), (_, true_norm, true_rate) in zip(history, reference, strict=True):
            assert (norm, rate) == (pytest.approx(true_norm, rel=1e-5), true_rate)
        for name, weight in weights.items():
            np.testing.assert_allclose(reached[name], weight, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", now(["float32", "bfloat16"], "bfloat16"))
def test_scoring_alone_takes_the_weights_of_any_layout(pair: World, models: dict[str, str], tmp_path: Path, dtype: str) -> None:
    """They are held in the precision that computes, to which exports are rounded."""
    weights: Arrays
    ((_, weights), _) = pair.run(save_checkpoint, models["llama-untied"], LAYOUTS["tp2"], OPTIMIZER, tmp_path, before=2, after=0)
    loaded = weights_of(models["llama-untied"], tmp_path, dtype=dtype)
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        due = torch.from_numpy(weight).to(getattr(torch, dtype)).float().numpy()
        np.testing.assert_array_equal(loaded[name], due, err_msg=name)


@pytest.mark.usefixtures("alone")
def test_unusable_checkpoints_are_named(models: dict[str, str], tmp_path: Path) -> None:
    continue_training(models["qwen3-tied"], MegatronConfig(), OPTIMIZER, tmp_path, before=1, after=0)
    with pytest.raises(CheckpointError, match=r"of another model: lm_head.weight is not the same in both"):
        weights_of(models["llama3-rope"].replace("llama3-rope", "llama-untied"), tmp_path)
    (tmp_path / "layer-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank 0 cannot read the checkpoint.*layer-2"):
        weights_of(models["qwen3-tied"], tmp_path)
    (tmp_path / "layer-2.safetensors").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"rank 0 cannot read the checkpoint"):
        weights_of(models["qwen3-tied"], tmp_path)


@pytest.mark.usefixtures("alone")
def test_a_full_disk_is_a_checkpoint_error(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("skyrl_engine_megatron.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write .*No space left on device") as caught:
        save_checkpoint(models["qwen3-tied"], MegatronConfig(), OPTIMIZER, tmp_path, before=1, after=0)
    assert "Make room" in caught.value.remedy


@pytest.mark.parametrize("name", now(["qwen3-tied", "llama-untied", "qwen2-untied", "qwen3-moe"], "qwen3-tied"))
@pytest.mark.parametrize("layout", now(["tp2", "pp2", "cp2", "dp2"], "tp2", "pp2"))
def test_the_export_is_what_was_trained(pair: World, models: dict[str, str], tmp_path: Path, name: str, layout: str) -> None:
    """Weights equal bit for bit, and transformers' log-probabilities are the backend's."""
    ranks = pair.run(export_weights, models[name], LAYOUTS[layout], tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    start = AutoModelForCausalLM.from_pretrained(models[name])
    assert loaded.dtype == torch.float32
    assert loaded.config.tie_word_embeddings == name.endswith("-tied")
    assert dict(loaded.named_parameters()).keys() == dict(start.named_parameters()).keys()
    for weights, _ in ranks:
        assert weights.keys() == dict(loaded.named_parameters()).keys()
        for key, parameter in loaded.named_parameters():
            np.testing.assert_array_equal(weights[key], parameter.detach().numpy(), err_msg=key)
    assert not torch.equal(loaded.model.embed_tokens.weight, start.model.embed_tokens.weight)
    true = definition(str(tmp_path), documents(VOCABULARY), dtype=torch.float32)
    for _, output in ranks:
        if output.coords.collects:
            for place, number in enumerate(output.sample_ids):
                expected = true.logprobs.get(int(number), np.zeros(0))
                np.testing.assert_allclose(output.fields["logprobs"][place], expected, atol=1e-4)


@pytest.mark.usefixtures("alone")
def test_an_export_that_cannot_be_written_is_a_model_error(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel.save_pretrained", full)
    with pytest.raises(ModelError, match="No space left on device"):
        export_weights(models["qwen3-tied"], MegatronConfig(), tmp_path)


@pytest.mark.usefixtures("alone")
def test_a_model_follows_another_in_one_process(models: dict[str, str]) -> None:
    set_up(models["qwen3-tied"], MegatronConfig())
    set_up(models["llama-untied"], MegatronConfig())
