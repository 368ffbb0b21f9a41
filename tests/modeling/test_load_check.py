"""A rehearsal refuses faults seen without weights, in the words of loading."""

import json
import logging.handlers
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.modeling.load_check import check_loading
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.testing.adapters import write_adapter

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


FALCON = {
    "mamba_d_ssm": 16,
    "mamba_n_heads": 2,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "max_position_embeddings": 64,
}
DEEPSEEK = {
    "moe_intermediate_size": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
}
SHIFTED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class ShiftedConfig(LlamaConfig):
    model_type = "shifted"


class ShiftedForCausalLM(LlamaForCausalLM):
    config_class = ShiftedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.register_forward_hook(shift)


def shift(layer, inputs, output):
    return output + torch.cat([torch.zeros_like(output[:, :1]), output[:, :-1]], 1)
"""


def save_model(folder: Path, family: str, **options: Any) -> ModelConfig:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelConfig(str(folder))


def packs(spec: ModelConfig) -> str | None:
    """Return why loading finds that the model cannot be trained on packed rows; None if it can."""
    _, scorer = load_scorer(spec)
    return None if scorer.segment_support.layers else scorer.segment_support.refusal


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
        ("gemma2", {"attn_logit_softcapping": 30.0}),
        ("mistral", {"sliding_window": 3}),
        ("gpt2", {}),
        ("mamba", {}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("stablelm", {}),
        ("jamba", {"mamba_d_state": 4}),
        ("diffllama", {"num_key_value_heads": 2}),
        ("biogpt", {}),
        ("falcon_h1", FALCON),
        ("deepseek_v32", DEEPSEEK),
    ],
)
def test_packed_rows_are_refused_exactly_where_loading_refuses_them(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    spec = save_model(tmp_path, family, **options)
    refusal = packs(spec)
    if refusal is None:
        check_loading(spec, "packed")
    else:
        with pytest.raises(UnsupportedError, match="cannot be trained on packed rows: ") as caught:
            check_loading(spec, "packed")
        # how far documents differ depends on values
        assert refusal.partition(" by ")[0] in caught.value.cause
        assert "padded" in caught.value.remedy
    check_loading(spec, "padded")


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("falcon_h1", FALCON, "a part of it beside the attention mixes the documents of a packed row"),
        (
            "deepseek_v32",
            DEEPSEEK,
            "the code of DeepseekV32Attention cannot compute a row of several documents, which comes without an",
        ),
    ],
)
def test_families_whose_layers_mix_documents_or_need_a_mask_are_refused_in_words(
    tmp_path: Path, family: str, options: dict[str, Any], message: str
) -> None:
    """State-space models next to the attention of every layer, and an indexer that reads the mask."""
    with pytest.raises(UnsupportedError) as caught:
        check_loading(save_model(tmp_path, family, **options), "packed")
    assert message in caught.value.cause
    assert not caught.value.cause.partition("packed rows: ")[2].startswith(("TypeError", "'NoneType'"))


def test_a_layer_of_its_own_that_mixes_tokens_is_refused(tmp_path: Path) -> None:
    """Code that comes with a model: a Llama whose layers add the token before, as some short convolutions do."""
    spec = save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "shifted.ShiftedConfig", "AutoModelForCausalLM": "shifted.ShiftedForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "shifted", "auto_map": names}))
    (tmp_path / "shifted.py").write_text(SHIFTED)
    trusted = ModelConfig(spec.path, trust_remote_code=True)
    assert packs(trusted) is not None
    with pytest.raises(UnsupportedError, match="mixes the documents of a packed row"):
        check_loading(trusted, "packed")
    check_loading(trusted, "padded")


def test_mamba_is_among_those_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="knows no way to compute MambaForCausalLM's attention"):
        check_loading(save_model(tmp_path, "mamba"), "packed")


def test_torch_prints_nothing_of_what_experts_cannot_compute_without_values(tmp_path: Path) -> None:
    """It prints a traceback by its own logger, although the failure is caught: packed rows of a mixture of experts are trained all the same."""
    logger, records = logging.getLogger("torch._subclasses.fake_tensor"), logging.handlers.BufferingHandler(100)
    logger.addHandler(records)
    try:
        check_loading(save_model(tmp_path, "mixtral", num_local_experts=2), "packed")
        assert records.buffer == []
        logger.error("and its words are heard again afterwards")
        assert len(records.buffer) == 1
    finally:
        logger.removeHandler(records)


def test_random_states_and_weights_are_left_alone(tmp_path: Path) -> None:
    spec = save_model(tmp_path, "llama")
    before = torch.get_rng_state()
    check_loading(spec, "packed")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_act": "nosuch"}, r"the llama model of .* cannot be built from its config\.json: KeyError: 'nosuch'"),
        ({"vocab_size": -3}, r"cannot be built from its config\.json"),
    ],
)
def test_a_configuration_that_no_model_can_be_made_from(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    spec = save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=match) as caught:
        check_loading(spec, "padded")
    assert caught.value.remedy


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "gpt2"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_weights_of_another_shape(tmp_path: Path, family: str, lora: LoraConfig | None) -> None:
    """They are refused as loading does, or left to it where transformers makes one tensor of several; right ones always pass."""
    spec = ModelConfig(save_model(tmp_path, family).path, lora=lora)
    check_loading(spec, "padded")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 48}))
    if family in ("qwen3_moe", "mixtral"):
        check_loading(spec, "padded")
    else:
        with pytest.raises(ModelError, match=r"has the shape \[64, \d+\] in .*model\.safetensors, and .* asks for \[48, \d+\]"):
            check_loading(spec, "padded")
    with pytest.raises(ModelError, match=r"has the shape \[64, \d+\] in "):
        load_scorer(ModelConfig(spec.path))


def test_targets_that_do_not_exist(tmp_path: Path) -> None:
    spec = save_model(tmp_path, "llama")
    with pytest.raises(ModelError, match="'no_such', which no linear layer"):
        check_loading(ModelConfig(spec.path, lora=LoraConfig(targets=("no_such",))), "padded")


def test_an_adapter_without_whole_weights_or_configuration(tmp_path: Path) -> None:
    spec = save_model(tmp_path / "base", "llama")
    write_adapter(spec.path, adapter := tmp_path / "adapter")
    spec = ModelConfig(spec.path, lora=LoraConfig(path=str(adapter)))
    check_loading(spec, "padded")
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors is damaged"):
        check_loading(spec, "padded")
    file.unlink()
    with pytest.raises(ModelError, match=r"the adapter .* holds no adapter_model\.safetensors"):
        check_loading(spec, "padded")
    (adapter / "adapter_config.json").write_text('{"r":\n')
    with pytest.raises(ModelError, match=r"adapter_config\.json is not valid JSON: line 2, column 1"):
        check_loading(spec, "padded")


def test_layers_that_peft_refuses_are_answered_with_others(tmp_path: Path) -> None:
    spec = save_model(tmp_path, "mamba")
    with pytest.raises(ModelError, match=r"PEFT refuses adapters in .*'out_proj' is incompatible") as caught:
        check_loading(ModelConfig(spec.path, lora=LoraConfig(targets=("out_proj",))), "padded")
    assert "they are called dt_proj, in_proj, out_proj, x_proj" in caught.value.remedy


class Code:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_weights_that_are_missing_or_hold_code(tmp_path: Path) -> None:
    spec = save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        check_loading(spec, "padded")
    torch.save({"code": Code(tmp_path / "trace")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin holds more than tensors .*mkdir"):
        check_loading(spec, "padded")
    assert not (tmp_path / "trace").exists()
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    check_loading(spec, "padded")
