"""The value head on the backend: sharded, trained, saved, resumed, exported, and exact.

Tolerances as in test_fsdp_gradients.py. The head's weight is [1, h]: two ranks share one row, so that one of them holds none of it.
"""

from pathlib import Path

import numpy as np
import pytest
from fsdp_tasks import asks_for_values, critic_continued, critic_gradients_of, head_unused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import AdamWSettings, ModelConfig
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.testing.backends.batches import definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World

BOTH = ("logprobs", "values")


@pytest.mark.parametrize("name", ["critic", "critic-tied"])
@pytest.mark.parametrize("needs", [BOTH, ("values",)], ids=["with-logprobs", "values-alone"])
def test_two_ranks_equal_one_plain_process(pair: World, models: dict[str, str], name: str, needs: tuple[str, ...]) -> None:
    """Values alone leave an untied language-model head without a gradient, on every rank."""
    due = definition(models[name], documents(), needs=needs)
    assert ("lm_head.weight" in due.gradients) == (needs == BOTH and name == "critic")
    ranks = pair.run(critic_gradients_of, models[name], *needs, sizes=(1, 4))
    for (first, gradients), (second, _) in zip(*ranks, strict=True):
        assert first + second == pytest.approx(due.loss, rel=1e-5)
        assert find_worst_difference(gradients, due.gradients) <= 1e-5


@pytest.mark.usefixtures("alone")
def test_float64_is_exact_to_1e_10(models: dict[str, str]) -> None:
    due = definition(models["critic"], documents(), needs=BOTH)
    for total, gradients in critic_gradients_of(models["critic"], *BOTH, sizes=(1, 8), dtype="float64"):
        assert total == pytest.approx(due.loss, rel=1e-10)
        assert find_worst_difference(gradients, due.gradients) <= 1e-10


def test_bfloat16_stays_within_its_precision(pair: World, models: dict[str, str]) -> None:
    due = definition(models["critic"], documents(), needs=BOTH)
    ranks = pair.run(critic_gradients_of, models["critic"], *BOTH, sizes=(4,), dtype="bfloat16", activation_checkpointing=True)
    for (first, gradients), (second, _) in zip(*ranks, strict=True):
        assert first + second == pytest.approx(due.loss, rel=1e-2)
        assert find_worst_difference(gradients, due.gradients) <= 5e-2


@pytest.mark.parametrize("unscored", [(4, 5, 6, 7), (0, 1, 2, 3, 4, 6, 7)], ids=["second-rank", "every-rank"])
def test_ranks_without_scored_tokens_take_part(pair: World, models: dict[str, str], unscored: tuple[int, ...]) -> None:
    ranks = pair.run(critic_gradients_of, models["critic"], "values", sizes=(4,), unscored=unscored)
    due = definition(models["critic"], documents(unscored=unscored), needs=("values",))
    for _, gradients in ranks[0]:
        if len(unscored) > 4:
            assert all((gradient == 0).all() for gradient in gradients.values())
        else:
            assert find_worst_difference(gradients, due.gradients) <= 1e-5


def test_resumed_equals_uninterrupted_and_the_export_holds_the_head(pair: World, models: dict[str, str], tmp_path: Path) -> None:
    optimizer = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)
    for uninterrupted, resumed in pair.run(critic_continued, models["critic"], optimizer, tmp_path / "state", tmp_path / "out"):
        assert uninterrupted[0] == resumed[0]
        for name, weight in uninterrupted[1].items():
            np.testing.assert_array_equal(weight, resumed[1][name], err_msg=name)
    weights = resumed[1]
    assert not np.array_equal(weights["score.weight"], load_file(Path(models["critic"]) / "model.safetensors")["score.weight"])
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert dict(causal.named_parameters()).keys() == weights.keys() - {"score.weight", "score.bias"}
    model, _ = load_scorer(ModelConfig(str(tmp_path / "out"), value_head=True))
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), weights[name], err_msg=name)


def test_a_head_that_no_loss_reads_is_left_alone(pair: World, models: dict[str, str]) -> None:
    for gradients in pair.run(head_unused, models["critic"]):
        assert "lm_head.weight" in gradients
        assert not gradients.keys() & {"score.weight", "score.bias"}


@pytest.mark.usefixtures("alone")
def test_values_of_a_model_without_the_head_are_refused(models: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match=r"needs values, which the model on the fsdp backend does not compute"):
        asks_for_values(models["critic"])
