"""The backend's promise: gradients are sums over ranks, micro-batches and calls.

Compared with the plain definition (one process, one unpadded sequence at a time, whole logits), per parameter, as ||g - g'|| / ||g'||. Two
ranks, left padding, an empty row, chunks of five positions. float32 sums in another order differ by about 1e-7 per operation, so 1e-5 leaves
no room for a wrong scale, which would show as 0.5 or 1. Not covered: CUDA (see test_fsdp_cuda.py), dropout, MoE router losses.
"""

from typing import Any

import numpy as np
import pytest
from fsdp_tasks import clip_norms, gradients_of, plain_adamw, train_from_start

from skyrl_engine.contracts import AdamWSettings
from skyrl_engine.testing.backends.batches import definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.plugin import FsdpConfig

NAMES = ("qwen3-tied", "qwen3-untied", "llama-tied", "llama-untied")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.nightly),
        pytest.param({"activation_checkpointing": True}, id="activation-checkpointing"),
        pytest.param({"options": FsdpConfig(reshard_after_forward=False)}, id="keep-gathered"),
    ],
)
def test_two_ranks_equal_one_plain_process(pair: World, models: dict[str, str], name: str, options: dict[str, Any]) -> None:
    due = definition(models[name], documents())
    ranks = pair.run(gradients_of, models[name], sizes=(1, 2, 4), **options)
    for (first, gradients), (second, _) in zip(*ranks, strict=True):
        assert first + second == pytest.approx(due.loss, rel=1e-5)
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "cohere", "qwen3_moe"])
def test_other_architectures_are_sharded_alike(pair: World, models: dict[str, str], name: str) -> None:
    """Biases and transposed weights, soft-capped and scaled logits, experts."""
    due = definition(models[name], documents())
    ranks = pair.run(gradients_of, models[name], sizes=(2,), activation_checkpointing=True)
    for (first, gradients), (second, _) in zip(*ranks, strict=True):
        assert first + second == pytest.approx(due.loss, rel=1e-5)
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_equals_a_plain_process(models: dict[str, str], name: str) -> None:
    due = definition(models[name], documents())
    for total, gradients in gradients_of(models[name], sizes=(1, 3, 8), activation_checkpointing=name == "qwen3-tied"):
        assert total == pytest.approx(due.loss, rel=1e-5)
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.usefixtures("alone")
def test_float64_is_exact_to_1e_10(models: dict[str, str]) -> None:
    due = definition(models["qwen3-tied"], documents())
    for total, gradients in gradients_of(models["qwen3-tied"], sizes=(1, 8), dtype="float64"):
        assert total == pytest.approx(due.loss, rel=1e-10)
        assert find_worst_difference(gradients, due.gradients) <= 1e-10


@pytest.mark.usefixtures("alone")
def test_temperature_divides_the_logits(models: dict[str, str]) -> None:
    due = definition(models["llama-untied"], documents(), temperature=0.7)
    ((total, gradients),) = gradients_of(models["llama-untied"], sizes=(3,), temperature=0.7)
    assert total == pytest.approx(due.loss, rel=1e-5)
    assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
def test_bfloat16_stays_within_its_precision(pair: World, models: dict[str, str], name: str) -> None:
    """bfloat16 keeps 8 bits, 4e-3 per rounding; a dozen roundings between loss and gradient end near 2e-2. A wrong scale would be 0.5 or 1."""
    due = definition(models[name], documents())
    ranks = pair.run(gradients_of, models[name], sizes=(1, 4), dtype="bfloat16")
    for (first, gradients), (second, _) in zip(*ranks, strict=True):
        assert first + second == pytest.approx(due.loss, rel=1e-2)
        assert find_worst_difference(gradients, due.gradients) <= 5e-2
        assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float32)}


@pytest.mark.usefixtures("alone")
def test_one_rank_computes_in_bfloat16_too(models: dict[str, str]) -> None:
    due = definition(models["qwen3-tied"], documents())
    ((total, gradients),) = gradients_of(models["qwen3-tied"], sizes=(2,), dtype="bfloat16")
    assert total == pytest.approx(due.loss, rel=1e-2)
    assert total != pytest.approx(due.loss, rel=1e-7), "bfloat16 was not used"
    assert find_worst_difference(gradients, due.gradients) <= 5e-2


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["mamba", "mamba2", "minimax"])
def test_models_that_keep_residuals_or_buffers_in_float32_compute_in_bfloat16(models: dict[str, str], name: str) -> None:
    """Recurrences round more often than attention: gradients stay within a fifth, where a wrong scale would be 0.5 or 1."""
    due = definition(models[name], documents())
    ((total, gradients),) = gradients_of(models[name], sizes=(2,), dtype="bfloat16")
    assert total == pytest.approx(due.loss, rel=1e-2)
    assert find_worst_difference(gradients, due.gradients) <= 0.2


@pytest.mark.parametrize("unscored", [(4, 5, 6, 7), (0, 1, 2, 3, 4, 6, 7)], ids=["second-rank", "every-rank"])
def test_ranks_without_scored_tokens_take_part(pair: World, models: dict[str, str], unscored: tuple[int, ...]) -> None:
    ranks = pair.run(gradients_of, models["qwen3-untied"], sizes=(1, 4), unscored=unscored)
    for _, gradients in ranks[0]:
        if len(unscored) > 4:
            assert all((gradient == 0).all() for gradient in gradients.values())
        else:
            assert (
                find_worst_difference(gradients, definition(models["qwen3-untied"], documents(unscored=unscored)).gradients) <= 1e-5
            )


def test_both_ranks_see_one_gradient(pair: World, models: dict[str, str]) -> None:
    first, second = pair.run(gradients_of, models["llama-tied"], sizes=(2,))
    for name, gradient in first[0][1].items():
        np.testing.assert_array_equal(gradient, second[0][1][name])


def test_the_reported_norm_is_the_true_one_and_clipping_reaches_the_limit(pair: World, models: dict[str, str]) -> None:
    due = definition(models["qwen3-tied"], documents())
    true = np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in due.gradients.values()))
    assert true > 1.0
    for limit in (true / 7, true * 7):
        for reported, left in pair.run(clip_norms, models["qwen3-tied"], limit):
            assert reported == pytest.approx(true, rel=1e-5)
            assert left == pytest.approx(min(limit, true), rel=1e-5)


def test_three_steps_equal_plain_adamw(pair: World, models: dict[str, str]) -> None:
    """A large epsilon makes the update follow the gradient's scale, which AdamW would otherwise hide."""
    optimizer = AdamWSettings(learning_rate=1e-2, epsilon=0.5, weight_decay=0.1, max_grad_norm=1.0)
    (history, weights), (other_history, same) = pair.run(train_from_start, models["qwen3-untied"], optimizer, 3)
    expected, plain = plain_adamw(models["qwen3-untied"], optimizer, (1e-2, 1e-2, 1e-2))
    for (loss, norm, rate), (second_loss, _, _), (true_loss, true_norm, true_rate) in zip(
        history, other_history, expected, strict=True
    ):
        assert loss + second_loss == pytest.approx(true_loss, rel=1e-5)
        assert norm == pytest.approx(true_norm, rel=1e-4)
        assert rate == pytest.approx(true_rate, rel=1e-12)
    assert weights.keys() == same.keys() == plain.keys()
    for name, weight in plain.items():
        np.testing.assert_allclose(weights[name], weight, rtol=1e-4, atol=1e-6, err_msg=name)
