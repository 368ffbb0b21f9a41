"""Cases beyond the conformance suite: precision, recomputation, architectures, parameters that are reached late, a forgotten factor.

Compared with the plain definition (one process, one unpadded document at a time, whole logits), per parameter, as ||g - g'|| / ||g'||.
float32 sums in another order differ by about 1e-7 per operation, so 1e-5 leaves no room for a wrong scale, which would show as 0.5 or 1;
bfloat16 keeps 8 bits, and a dozen roundings end near 2e-2. Not covered: CUDA (test_deepspeed_cuda.py), dropout.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_day import now
from deepspeed_tasks import gradients_of, precision, reached_late, scored
from transformers import AutoModelForCausalLM

from skyrl_engine.modeling.tiny import VOCABULARY, write_model, write_vision_model
from skyrl_engine.testing.backends.batches import DefinedResult, definition, documents, find_worst_difference, picture_documents
from skyrl_engine.testing.ranks.world import World


def stages(*slow: int) -> list[Any]:
    """Stage 3, which has the most to go wrong; the others in proofs."""
    return [*(pytest.param(stage, marks=pytest.mark.proof) for stage in slow), 3]


@pytest.fixture(scope="module")
def due(models: dict[str, str]) -> dict[str, DefinedResult]:
    """The right loss and gradient by model."""
    return {name: definition(models[name], documents(VOCABULARY), dtype=torch.float32) for name in models if name != "dropout"}


def norm(gradients: dict[str, Any]) -> float:
    return float(np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in gradients.values())))


def check(ranks: Any, due: DefinedResult, tolerance: float) -> None:
    """The ranks' parts of the loss add up, every rank has the whole gradient, and the step reports its norm."""
    for (first, gradients, reported), (second, other_gradients, _) in zip(*ranks, strict=True):
        assert first + second == pytest.approx(due.loss, rel=max(1e-5, tolerance / 5))
        assert find_worst_difference(gradients, due.gradients) <= tolerance
        assert reported == pytest.approx(norm(due.gradients), rel=tolerance)
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, other_gradients[name])


@pytest.mark.parametrize("stage", stages(0, 1, 2))
@pytest.mark.parametrize("rows", now(["padded", "packed"], "packed"))
def test_activation_checkpointing_changes_nothing(
    pair: World, models: dict[str, str], due: dict[str, DefinedResult], rows: str, stage: int
) -> None:
    ranks = pair.run(gradients_of, models["qwen3"], stage, rows=rows, activation_checkpointing=True)
    check(ranks, due["qwen3"], 1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("stage", stages(2))
def test_other_architectures_are_divided_alike(
    pair: World, models: dict[str, str], due: dict[str, DefinedResult], name: str, stage: int
) -> None:
    check(pair.run(gradients_of, models[name], stage, sizes=(2,)), due[name], 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["experts", "windows"])
def test_models_that_see_with_experts_or_windows(pair: World, tmp_path: Path, kind: str, stage: int) -> None:
    """Qwen3-VL-MoE and Qwen2.5-VL; dense Qwen3-VL is the kit's. Micro-batches with images and without."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if kind == "experts" else None
    write_vision_model(tmp_path, tied=False, experts=experts, windows=kind == "windows")
    due = definition(str(tmp_path), picture_documents(VOCABULARY, "own"), dtype=torch.float32)
    ranks = pair.run(gradients_of, str(tmp_path), stage, rows="padded" if stage == 3 else "packed", pictures=True)
    check(ranks, due, 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_packed_rows_of_scores_with_soft_caps_and_sinks_are_as_separate_ones(
    pair: World, models: dict[str, str], due: dict[str, DefinedResult], name: str
) -> None:
    check(pair.run(gradients_of, models[name], 3, rows="packed", sizes=(2,)), due[name], 1e-5)


def test_parameters_that_are_kept_whole_are_summed_too(pair: World, models: dict[str, str], due: dict[str, DefinedResult]) -> None:
    check(pair.run(gradients_of, models["llama"], 3, threshold=1000), due["llama"], 1e-5)


@pytest.mark.parametrize("stage", stages(1, 2))
@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.proof)])
def test_bfloat16_stays_within_its_precision(
    pair: World, models: dict[str, str], due: dict[str, DefinedResult], name: str, stage: int
) -> None:
    ranks = pair.run(gradients_of, models[name], stage, sizes=(1, 4), dtype="bfloat16")
    check(ranks, due[name], 5e-2)
    assert find_worst_difference(ranks[0][0][1], due[name].gradients) > 1e-4, "bfloat16 was not used"
    assert {gradient.dtype for gradient in ranks[0][0][1].values()} == {np.dtype(np.float32)}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", ["mamba", pytest.param("minimax", marks=pytest.mark.proof)])
@pytest.mark.parametrize("stage", stages(2))
def test_models_that_keep_residuals_or_buffers_in_float32_compute_in_bfloat16(tmp_path: Path, family: str, stage: int) -> None:
    write_model(tmp_path, family)
    true = definition(str(tmp_path), documents(VOCABULARY), dtype=torch.float32)
    ((total, gradients, _),) = gradients_of(str(tmp_path), stage, sizes=(2,), dtype="bfloat16")
    assert total == pytest.approx(true.loss, rel=1e-2)
    assert find_worst_difference(gradients, true.gradients) <= 5e-2


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stage", stages(1, 2))
def test_weights_stay_float32_where_bfloat16_computes(models: dict[str, str], stage: int) -> None:
    """A step of 1e-6 is below bfloat16's resolution at 0.02, which is 6e-5: only float32 weights can take it."""
    before, after = precision(models["llama"], stage)
    saved = dict(AutoModelForCausalLM.from_pretrained(models["llama"]).named_parameters())
    assert before.keys() == saved.keys()
    for name, weight in before.items():
        np.testing.assert_array_equal(weight, saved[name].detach().numpy(), err_msg=name)
        moved = np.abs(after[name] - weight)
        assert 0 < moved.max() <= 1.1e-6, name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_is_reached_late_has_nothing_of_the_step_before(pair: World, models: dict[str, str], stage: int) -> None:
    """The first call of a step reads values alone, which leaves the language-model head out."""
    chosen = documents(VOCABULARY)
    both = [definition(models["critic"], chosen, dtype=torch.float32, needs=(need,)) for need in ("values", "logprobs")]
    names = both[0].gradients.keys() | both[1].gradients.keys()
    due = {name: sum(result.gradients.get(name, 0.0) for result in both) for name in names}
    for first, again in pair.run(reached_late, models["critic"], stage):
        assert find_worst_difference(first, due) <= 1e-5
        assert find_worst_difference(again, due) <= 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_forgetting_the_mean_over_ranks_would_be_noticed(
    pair: World, models: dict[str, str], due: dict[str, DefinedResult], stage: int
) -> None:
    for ranks in pair.run(gradients_of, models["qwen3"], stage, sizes=(4,), forgotten=True):
        assert find_worst_difference(ranks[0][1], due["qwen3"].gradients) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_that_only_score_divide_the_weights_too(
    pair: World, models: dict[str, str], due: dict[str, DefinedResult], dtype: str
) -> None:
    """Without an optimizer no float32 weights are kept next to those that compute."""
    (first, weights), (second, _) = pair.run(scored, models["qwen3"], dtype=dtype)
    assert first + second == pytest.approx(due["qwen3"].loss, rel=1e-5 if dtype == "float32" else 1e-2)
    for name, parameter in AutoModelForCausalLM.from_pretrained(models["qwen3"]).named_parameters():
        tolerance = 0 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(weights[name], parameter.detach().numpy(), rtol=tolerance, err_msg=name)
