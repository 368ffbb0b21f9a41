"""Linear layers in 4 bits compute with the numbers that the definition of NF4 gives, in both passes, and hold nothing else."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import nn

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.errors import EngineError, ModelError, UnsupportedError
from skyrl_engine.modeling import low_bits
from skyrl_engine.modeling.exporting import write_merged, write_pretrained
from skyrl_engine.modeling.four_bit import FourBitLinear, list_four_bit_layers
from skyrl_engine.modeling.loading import load_beside, load_causal_lm, load_scorer, load_skeleton
from skyrl_engine.modeling.lora import iterate_merged_weights
from skyrl_engine.modeling.sampler_model import iterate_stored_weights
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.adapters import round_to_four_bits, write_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("base")
    write_model(path)
    return str(path)


def spec_of(base: str, **lora: Any) -> ModelConfig:
    return ModelConfig(base, lora=LoraConfig(load_in_4bit=True, **lora))


@pytest.mark.parametrize("shape", [(64, 64), (32, 48), (3, 33), (5, 7), (1, 1001), (48, 96)])
def test_weights_are_those_of_the_definition_whatever_the_width(shape: tuple[int, int]) -> None:
    """Taken as matrices, those of 32 x 48 would be other numbers' by bitsandbytes 0.50 on CPUs."""
    linear = nn.Linear(*reversed(shape))
    due = round_to_four_bits(linear.weight)
    layer = FourBitLinear(linear, torch.float32, double=False)
    torch.testing.assert_close(layer.weight, due, rtol=1e-6, atol=1e-8)
    assert not layer.state_dict().keys() - {"bias"}
    assert sum(buffer.nbytes for buffer in layer.buffers()) == (32 + 4) * -(-linear.weight.numel() // 64)


def test_scales_in_8_bits_change_weights_by_less_than_scales_differ() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(512, 300)
    plain, double = (FourBitLinear(linear, torch.float32, double=double) for double in (False, True))
    assert double.scales.dtype == torch.uint8
    blocks = round_to_four_bits(linear.weight).reshape(-1, 64).abs().amax(1)
    assert (plain.weight - double.weight).abs().max() < (blocks.max() - blocks.min()) / 10
    assert sum(buffer.nbytes for buffer in double.buffers()) < 0.92 * sum(buffer.nbytes for buffer in plain.buffers())


def test_a_block_of_zeros_stays_zero() -> None:
    linear = nn.Linear(64, 2)
    with torch.no_grad():
        linear.weight[0] = 0
    for double in (False, True):
        assert FourBitLinear(linear, torch.float32, double=double).weight[0].abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_their_gradients_are_those_of_the_weights_and_nothing_waits_for_backward(dtype: torch.dtype) -> None:
    layer = FourBitLinear(nn.Linear(48, 32), dtype, double=False).requires_grad_(requires_grad=False)
    inputs = torch.randn(2, 5, 48, dtype=dtype, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        product = layer(inputs)
    assert not kept
    (product.float() ** 2).sum().backward()
    twin = inputs.detach().clone().requires_grad_()
    expected = nn.functional.linear(twin, layer.weight.to(dtype)) + layer.bias.to(dtype)
    (expected.float() ** 2).sum().backward()
    assert torch.equal(product, expected)
    assert torch.equal(inputs.grad, twin.grad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dora", [False, True])
def test_all_ranks_hold_the_same_and_adapters_in_float32(base: str, dtype: Any, dora: bool) -> None:
    spec = evolve(spec_of(base, dora=dora, double_quantization=True), dtype=dtype)
    loaded, skeleton = (
        {name: (tensor.shape, tensor.dtype) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        for model, _ in (load_scorer(spec), load_skeleton(spec))
    )
    frozen_apart = {name for name in loaded if ".lora_" not in name}
    assert loaded.keys() == skeleton.keys()
    assert {name for name in loaded if loaded[name] != skeleton[name]} <= frozen_apart
    assert {loaded[name][1] for name in loaded.keys() - frozen_apart} == {torch.float32}


def test_what_is_merged_and_exported_is_the_rounded_base_with_its_adapters(base: str, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path / "adapter")
    spec = spec_of(base, path=adapter, double_quantization=True)
    model, _ = load_scorer(spec)
    merged = dict(iterate_merged_weights(model, lambda parameter: parameter.detach()))
    plain = load_causal_lm(ModelConfig(base))
    assert merged.keys() == dict(plain.named_parameters()).keys()
    layers = {name.removesuffix(".base_layer"): layer for name, layer in list_four_bit_layers(model)}
    assert len(layers) == 2 * 7
    for name, parameter in plain.named_parameters():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            assert torch.equal(merged[name], parameter)
            continue
        adapted = model.get_submodule(name.removesuffix(".weight"))
        due = layer.weight + 2 * adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
        torch.testing.assert_close(merged[name], due, rtol=0, atol=1e-6)
    stored = dict(iterate_stored_weights(spec))
    assert all(torch.equal(stored[name], merged[name]) for name in merged)
    write_merged(spec, tmp_path / "merged", "float32")
    exported = dict(load_causal_lm(ModelConfig(str(tmp_path / "merged"))).named_parameters())
    assert all(torch.equal(exported[name], merged[name]) for name in exported)
    write_pretrained(model, tmp_path / "again")
    assert {file.name for file in (tmp_path / "again").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_layers_without_adapters_are_in_4_bits_too_and_counted_as_frozen(base: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model, _ = load_scorer(spec_of(base, targets=("q_proj",)))
    assert len(list_four_bit_layers(model)) == 2 * 7
    assert "frozen stay mlp.down_proj (2)" in caplog.text
    assert re.search(r"\d+ of \d+ numbers are held in 4 bits", caplog.text)
    names = {name for name, _ in iterate_merged_weights(model, lambda parameter: parameter.detach())}
    assert names == dict(load_causal_lm(ModelConfig(base)).named_parameters()).keys()


def refusal(kind: type[EngineError], load: Any, spec: ModelConfig, *more: Any) -> str:
    with pytest.raises(kind) as caught:
        load(spec, *more)
    return f"{caught.value.cause}; {caught.value.remedy}"


def test_what_does_not_go_with_4_bits_is_refused_by_name(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(base)
    assert 'model.dtype is "float64"' in refusal(UnsupportedError, load_scorer, evolve(spec, dtype="float64"))
    assert "model.compile = true" in refusal(UnsupportedError, load_scorer, evolve(spec, compile=True))
    _, scorer = load_scorer(spec)
    assert "several sets of adapters" in refusal(UnsupportedError, load_beside, spec, scorer.segment_support)
    write_model(tmp_path / "gpt2", "gpt2", n_embd=48, n_layer=2, n_head=4)
    assert "has no linear layers" in refusal(ModelError, load_scorer, spec_of(str(tmp_path / "gpt2")))
    with pytest.raises(ValueError, match="set load_in_4bit = true, or remove it"):
        LoraConfig(double_quantization=True)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    low_bits.list_code_values.cache_clear()
    assert 'pip install "skyrl-engine[bitsandbytes]"' in refusal(UnsupportedError, load_skeleton, spec)


def test_experts_in_one_tensor_and_routers_stay_whole(tmp_path: Path) -> None:
    write_model(tmp_path, "mixtral", num_local_experts=4)
    model, _ = load_scorer(spec_of(str(tmp_path)))
    assert {name.split(".")[-2] for name, _ in list_four_bit_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    plain = dict(load_causal_lm(ModelConfig(str(tmp_path))).named_parameters())
    merged = dict(iterate_merged_weights(model, lambda parameter: parameter.detach()))
    experts = [name for name in plain if "experts" in name]
    assert experts
    assert all(np.array_equal(plain[name].detach(), merged[name]) for name in experts)
