"""Biases that routers choose by move with every step as the published rule says, on every layout alike: arXiv 2408.15664, algorithm 1.

The tokens that chose each expert are counted in transformers' own model, one document at a time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_day import now
from megatron_families import CORRECTED, LATENT, PLAIN
from megatron_router import CORRECTION, step_biases
from megatron_tasks import VOCABULARY, continue_training, export_weights, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import AdamWSettings, LoraConfig, ModelConfig
from skyrl_engine.testing.backends.batches import Arrays, documents
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_megatron.limits import refuse_model
from skyrl_engine_megatron.plugin import MegatronConfig

RATE = 0.0625
"""A power of 2, so that sums with biases are rounded alike."""

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
    "dp2": {},
    "ep2-of-dp2": {"expert_parallel": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes: dict[str, Any] = {**LATENT, "q_lora_rank": None, "rope_interleave": False, "rope_parameters": PLAIN}
    return save_tiny(tmp_path_factory.mktemp("corrected"), "deepseek_v3", tied=True, **sizes)


@pytest.fixture(scope="module")
def due(model: str) -> Arrays:
    """The biases after one step, by the rule."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    chosen: dict[str, torch.Tensor] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            experts = output[-1].flatten()
            chosen[name] = chosen.get(name, 0) + torch.bincount(experts, minlength=biases[name].numel())

        return hook

    biases = {name: buffer.clone() for name, buffer in network.named_buffers() if name.endswith(CORRECTION)}
    for name in biases:
        network.get_submodule(name.removesuffix(f".{CORRECTION}")).register_forward_hook(count(name))
    with torch.no_grad():
        for document in documents(VOCABULARY):
            if len(document.ids):
                network(input_ids=document.ids[None])
    assert all(len(set(tokens.tolist())) > 1 for tokens in chosen.values()), "every expert is chosen alike"
    return {
        name: (bias + RATE * torch.sign(chosen[name].double().mean() - chosen[name]).float()).numpy()
        for name, bias in biases.items()
    }


@pytest.mark.parametrize("layout", now(LAYOUTS, "cp2"))
def test_every_layout_moves_biases_by_the_rule(pair: World, model: str, due: Arrays, layout: str) -> None:
    for after, before in pair.run(step_biases, model, MegatronConfig(router_bias_rate=RATE, **LAYOUTS[layout])):
        assert after.keys() == before.keys() == due.keys()
        for name, expected in due.items():
            assert after[name].tolist() == expected.tolist()
            assert before[name].tolist() != expected.tolist()


@pytest.mark.nightly
def test_biases_are_resumed_to_the_bit_and_exported(pair: World, model: str, tmp_path: Path) -> None:
    options = MegatronConfig(router_bias_rate=RATE)
    for uninterrupted, resumed in pair.run(
        continue_training, model, options, AdamWSettings(learning_rate=1e-3), tmp_path, before=2, after=2
    ):
        assert resumed[0] == uninterrupted[0]
        assert any(name.endswith(CORRECTION) for name in resumed[1])
        assert all((resumed[1][name] == weight).all() for name, weight in uninterrupted[1].items())
    (weights, _), _ = pair.run(export_weights, model, options, tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, buffer in exported.named_buffers():
        if name.endswith(CORRECTION):
            assert buffer.tolist() == weights[name].tolist()


@pytest.mark.parametrize(
    ("family", "sizes", "model_keys", "cause"),
    [
        ("qwen3_moe", {}, {}, "routers of the model choose by no bias beside their scores"),
        ("llama", {}, {}, "backend.router_bias_rate = 0.001, and the model has no experts"),
        ("glm4_moe", CORRECTED, {"lora": LoraConfig()}, "changes the model under the adapters"),
    ],
)
def test_rates_without_effect_are_refused(family: str, sizes: dict[str, Any], model_keys: dict[str, Any], cause: str) -> None:
    config = AutoConfig.for_model(family, **sizes)
    with pytest.raises(UnsupportedError, match=cause):
        refuse_model(MegatronConfig(router_bias_rate=0.001), config, ModelConfig("the model", **model_keys))
