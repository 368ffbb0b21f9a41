"""Bytes that parts of a run take: estimates are held against what torch keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from transformers import AutoConfig

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.model_facts.memory import count_activation_bytes, plan_micro_batch_tokens
from skyrl_engine.model_facts.weight_files import count_parameters
from skyrl_engine.modeling.loading import build_causal_lm
from skyrl_engine.modeling.tiny import write_model

TOKENS = 64
GIB = 2**30


def count_kept_bytes(config: Any, path: Path) -> int:
    """Count the bytes that torch keeps for the backward pass of the decoder, each storage once, without the weights."""
    model = build_causal_lm(ModelConfig(str(path)), config)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)
    return sum(kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_activations_are_estimated_within_a_third(tmp_path: Path, family: str) -> None:
    write_model(
        tmp_path,
        family,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    config = AutoConfig.from_pretrained(tmp_path)
    estimate = count_activation_bytes(config, "float32", recomputed=False)
    assert estimate is not None
    kept = count_kept_bytes(config, tmp_path) / TOKENS
    assert kept / 1.5 < estimate < kept * 1.5, f"torch keeps {kept:.0f} bytes a token, the estimate is {estimate}"
    recomputed = count_activation_bytes(config, "float32", recomputed=True)
    assert recomputed is not None
    assert recomputed < estimate / 2


def test_parameters_are_counted_from_headers(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    model = build_causal_lm(ModelConfig(str(tmp_path)), AutoConfig.from_pretrained(tmp_path))
    assert count_parameters(ModelConfig(str(tmp_path))) == sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(ModelConfig("acme/on-the-hub")) is None


def test_a_budget_follows_the_memory(tmp_path: Path) -> None:
    """Numbers of Llama-3-8B: 8.03e9 parameters in 32 layers of width 4096."""
    config = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
    )
    model = ModelConfig("llama", dtype="bfloat16")

    def plan(model: ModelConfig, **options: Any) -> int:
        tokens = plan_micro_batch_tokens(config, model, 8_030_000_000, **{"memory": 80 * GIB, **options})
        assert tokens is not None
        assert tokens % 1024 == 0
        return tokens

    assert plan(model) == 1024, "a model that fills the device leaves the least"
    shared = plan(model, state_ranks=8)
    assert shared > 4096
    assert plan(model, state_ranks=8, memory=141 * GIB) > 2 * shared
    assert plan(evolve(model, activation_checkpointing=True), state_ranks=8) > 4 * shared
    assert plan(evolve(model, lora=LoraConfig())) > 1024
    assert plan_micro_batch_tokens(AutoConfig.for_model("mamba"), model, 1, memory=GIB) is None
