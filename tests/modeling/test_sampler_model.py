"""A plain model over another's memory computes what that one computes, now and after every change; a copy only what it is given."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_engine import ModelError
from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.modeling.lora import iterate_merged_weights
from skyrl_engine.modeling.sampler_model import fill, load_sampler_model, model_over
from skyrl_engine.modeling.tiny import make_parts_differ, write_model

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def storage(model: Any) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Use the model's own attention: the engine's takes rows by their documents alone."""
    model.set_attn_implementation("sdpa")
    output: Tensor = model.eval()(input_ids=torch.arange(20)[None], use_cache=False).logits
    return output


@pytest.mark.parametrize("family", FAMILIES)
def test_over_the_memory_of_a_model_in_training(family: str, tmp_path: Path) -> None:
    """Its attention is the engine's, its rotary frequencies are fixed, it has a value head; the twin has its numbers and none of that."""
    write_model(tmp_path, family, **FAMILIES[family])
    make_parts_differ(tmp_path)
    spec = ModelConfig(str(tmp_path), value_head=True, rotary_length=150 if family == "llama" else None)
    model, _ = load_scorer(spec)
    twin = model_over(spec, storage(model))
    assert not any(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    assert not hasattr(twin, "score")
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    torch.testing.assert_close(logits(twin), logits(model), atol=1e-5, rtol=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    torch.testing.assert_close(logits(twin), logits(model), atol=1e-5, rtol=0)


def test_a_tensor_that_is_not_shown_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    model, _ = load_scorer(ModelConfig(str(tmp_path)))
    shown = storage(model)
    shown["model.norm.weight"] = shown["model.norm.weight"][:3]
    with pytest.raises(ModelError, match=r"shows no memory of model\.norm\.weight"):
        model_over(ModelConfig(str(tmp_path)), shown)


def test_a_copy_takes_merged_adapters_and_leaves_the_value_head(tmp_path: Path) -> None:
    write_model(tmp_path)
    make_parts_differ(tmp_path)
    spec = ModelConfig(str(tmp_path), value_head=True, lora=LoraConfig(rank=2))
    model, _ = load_scorer(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    twin = load_sampler_model(spec, "cpu")
    untouched = logits(twin)
    fill(twin, iterate_merged_weights(model, lambda parameter: parameter.detach()), spec.path)
    torch.testing.assert_close(logits(twin), logits(model), atol=1e-4, rtol=0)
    assert (logits(twin) - untouched).abs().max() > 0.1
