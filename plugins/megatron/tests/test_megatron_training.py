"""Steps of AdamW: the same as torch's on the whole model, clipped by the norm of the sum; gradients that are not finite change nothing."""

from typing import Any

import numpy as np
import pytest
import torch
from by_day import now
from megatron_tasks import VOCABULARY, clip_norms, learn, not_finite, start, train_from_start
from transformers import AutoModelForCausalLM

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import AdamWSettings
from skyrl_engine.testing.backends.batches import WeightedObjective, build_padded, definition, documents
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.plugin import MegatronConfig

LAYOUTS = {
    "tp2": MegatronConfig(tensor_parallel=2),
    "cp2": MegatronConfig(context_parallel=2),
    "pp2": MegatronConfig(pipeline_parallel=2),
    "dp2": MegatronConfig(),
    "dp2-whole-optimizer": MegatronConfig(distributed_optimizer=False),
}
OPTIMIZER = AdamWSettings(learning_rate=1e-2, epsilon=0.5, weight_decay=0.1, max_grad_norm=1.0)
"""A large epsilon makes the update follow the gradient's scale, which AdamW would otherwise hide."""


def plain_adamw(directory: str, steps: int) -> tuple[list[tuple[float, float, float]], dict[str, Any]]:
    """Losses, norms, rates, and weights of torch's AdamW on transformers' model, in one process."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    plain = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], eps=0.5)
    history = []
    for rate in [1e-2] * steps:
        total = torch.zeros(())
        for document in documents(VOCABULARY):
            if len(document.ids):
                logprobs = model(input_ids=document.ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
                own = logprobs.gather(-1, document.ids[1:, None])[:, 0]
                score = own - 0.1 * (logprobs.exp() * logprobs).sum(-1)
                total = total - (document.weights[1:] * score).sum()
        plain.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()
        history.append((total.item(), norm.item(), rate))
    return history, {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", now(["qwen3-tied", "llama-untied"], "qwen3-tied"))
@pytest.mark.parametrize("layout", now(LAYOUTS, "cp2"))
def test_three_steps_equal_plain_adamw(pair: World, models: dict[str, str], layout: str, name: str) -> None:
    expected, true_weights = plain_adamw(models[name], 3)
    ranks = pair.run(train_from_start, models[name], LAYOUTS[layout], OPTIMIZER, 3)
    # the loss of tensor- or context-parallel ranks is one loss, seen twice
    losses = np.array([[step[0] for step in history] for history, _ in ranks])
    total = losses[0] if layout in ("tp2", "cp2") else losses.sum(0)
    np.testing.assert_allclose(total, [step[0] for step in expected], rtol=1e-5)
    for history, weights in ranks:
        for (_, norm, rate), (_, true_norm, true_rate) in zip(history, expected, strict=True):
            assert norm == pytest.approx(true_norm, rel=1e-4)
            assert rate == pytest.approx(true_rate, rel=1e-12)
        assert weights.keys() == true_weights.keys()
        for key, weight in true_weights.items():
            np.testing.assert_allclose(weights[key], weight, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("layout", now(LAYOUTS, "tp2"))
def test_the_reported_norm_is_the_true_one_and_clipping_reaches_the_limit(pair: World, models: dict[str, str], layout: str) -> None:
    gradients = definition(models["qwen3-tied"], documents(VOCABULARY)).gradients
    true = float(np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values())))
    assert true > 1.0
    for limit in (true / 7, true * 7):
        for reported, left in pair.run(clip_norms, models["qwen3-tied"], LAYOUTS[layout], limit):
            assert reported == pytest.approx(true, rel=1e-5)
            assert left == pytest.approx(min(limit, true), rel=1e-5)


@pytest.mark.parametrize("layout", now(LAYOUTS, "tp2"))
def test_a_gradient_that_is_not_finite_changes_nothing(pair: World, models: dict[str, str], layout: str) -> None:
    for said, same, history, expected in pair.run(not_finite, models["qwen3-tied"], LAYOUTS[layout]):
        assert said.splitlines()[-1].startswith("the gradient of optimizer step 1 is not finite (norm ")
        assert same
        assert history == expected


@pytest.mark.usefixtures("alone")
def test_tokens_outside_of_the_vocabulary_are_refused(models: dict[str, str]) -> None:
    backend = start(models["qwen3-tied"])
    batch = build_padded(documents(VOCABULARY), 8)
    batch[0].inputs["input_ids"][0, -1] = VOCABULARY
    with pytest.raises(DataError, match=f"token id {VOCABULARY}, the model's vocabulary has {VOCABULARY}"):
        backend.forward(batch, WeightedObjective())
    backend.close()


@pytest.mark.usefixtures("alone")
def test_scores_that_are_not_computed_are_refused(models: dict[str, str]) -> None:
    backend = start(models["qwen3-tied"])
    with pytest.raises(UnsupportedError, match="needs values, which the megatron backend does not compute"):
        backend.forward(build_padded(documents(VOCABULARY), 8), WeightedObjective(needs=("values",)))
    backend.close()


@pytest.mark.usefixtures("alone")
def test_two_models_share_the_groups_of_a_process(models: dict[str, str]) -> None:
    first, second = start(models["qwen3-tied"]), start(models["llama-untied"])
    first.close()
    assert learn(second, 1)[0][1] > 0
    second.close()
