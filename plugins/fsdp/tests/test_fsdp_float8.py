"""Products in float8: refused by name where they cannot be, and emulated here by the real torchao (`nox -s float8`)."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_tasks import arrays, start
from safetensors.torch import load_file

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import AdamWSettings, LoraConfig, ModelConfig
from skyrl_engine.testing.backends.batches import WeightedObjective, build_padded, documents
from skyrl_engine_fsdp import float8
from skyrl_engine_fsdp.plugin import FsdpConfig, fsdp

with_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="nox -s float8 has torchao")

ROUNDING = 0.25
"""Bound of gradients' relative distance from those of bfloat16: e4m3 has 4 significant bits, e5m2 3, so that each of the three products of a
layer is off by 6 to 12%, and errors of tokens cancel out in part."""


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({}, {"dtype": "float32"}, "model.dtype is float32"),
        ({"tensor_parallel": 2}, {}, "backend.tensor_parallel = 2"),
        ({"context_parallel": 2}, {}, "backend.context_parallel = 2"),
        ({}, {"lora": LoraConfig(rank=4)}, "model.lora has wrapped them"),
        ({"float8": "off", "float8_emulation": True}, {}, 'backend.float8 is "off"'),
    ],
)
def test_planning_refuses_models_and_layouts_that_are_not_made_for_it(options, model, words) -> None:
    config = FsdpConfig(**{"float8": "rowwise", **options})
    described = fsdp.skyrl_engine_describe_backend(config=config, world_size=2)
    with pytest.raises(UnsupportedError, match=words):
        described.refuse_model(None, ModelConfig("m", **{"dtype": "bfloat16", **model}))


@pytest.mark.parametrize(
    ("installed", "device", "capability", "words"),
    [
        (False, "cuda:0", (9, 0), "needs the package torchao"),
        (True, "cpu", None, "ranks compute on the CPU"),
        (True, "cuda:1", (8, 6), "cuda:1 has 8.6"),
        (True, "cuda:0", (8, 9), None),
        (True, "cuda:0", (9, 0), None),
    ],
)
def test_planning_refuses_devices_without_float8(monkeypatch, installed, device, capability, words) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda _name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    refuse = fsdp.skyrl_engine_describe_backend(config=FsdpConfig(float8="rowwise"), world_size=1).refuse_device
    model = ModelConfig("m", dtype="bfloat16")
    if words is None:
        refuse(model, device)
        return
    with pytest.raises(UnsupportedError, match=words):
        refuse(model, device)


def test_without_float8_nothing_is_refused() -> None:
    described = fsdp.skyrl_engine_describe_backend(config=None, world_size=1)
    described.refuse_model(None, ModelConfig("m", dtype="float64"))
    described.refuse_device(ModelConfig("m", dtype="float64"), "cpu")


def gradients_of(directory: str, recipe: str) -> tuple[float, dict[str, np.ndarray]]:
    options = FsdpConfig() if recipe == "off" else FsdpConfig(float8=recipe, float8_emulation=True)
    backend = start(directory, options=options, dtype="bfloat16")
    loss = backend.forward_backward(build_padded(documents(), 4), WeightedObjective()).metrics["loss"].value
    gradients = arrays(backend.gradients())
    backend.close()
    return loss, gradients


@with_torchao
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_gradients_are_those_of_bfloat16_up_to_the_rounding_of_float8(models: dict[str, str], recipe: str) -> None:
    loss, expected = gradients_of(models["qwen3-untied"], "off")
    in_float8, gradients = gradients_of(models["qwen3-untied"], recipe)
    assert in_float8 == pytest.approx(loss, rel=0.02)
    assert in_float8 != loss, "nothing was rounded"
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradients[name].dtype == np.float32
        off = np.linalg.norm(gradients[name] - gradient) / np.linalg.norm(gradient)
        assert off <= ROUNDING, name
        assert off > 0, name


@with_torchao
@pytest.mark.usefixtures("alone")
def test_aligned_layers_alone_are_converted_and_weights_stay_float32(models: dict[str, str], tmp_path: Path) -> None:
    """Keys and values of the tiny model have 24 outputs, which is no multiple of 16."""
    options = FsdpConfig(float8="rowwise", float8_emulation=True)
    backend = start(models["qwen3-untied"], AdamWSettings(learning_rate=1e-4), options=options, dtype="bfloat16")
    kinds = {name: type(module).__name__ for name, module in backend._model.named_modules() if isinstance(module, torch.nn.Linear)}
    kinds = {name: kind.removeprefix("FSDP") for name, kind in kinds.items()}
    assert {name.rpartition(".")[2] for name, kind in kinds.items() if kind == "Float8Linear"} == {
        *("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    }
    assert kinds["lm_head"] == kinds["model.layers.0.self_attn.k_proj"] == "Linear"
    before = arrays(backend.weights())
    backend.forward_backward(build_padded(documents(), 4), WeightedObjective())
    backend.optim_step()
    after = arrays(backend.weights())
    assert all(weight.dtype == np.float32 for weight in after.values())
    moved = abs(after["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]).max()
    assert moved == pytest.approx(1e-4, rel=0.01), "the first step of AdamW moves a weight by its rate"
    backend.save(tmp_path / "state")
    backend.export(tmp_path / "model")
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == before.keys()
    other = start(models["qwen3-untied"], AdamWSettings(learning_rate=1e-4), dtype="bfloat16")
    other.load(tmp_path / "state")
    for name, weight in arrays(other.weights()).items():
        np.testing.assert_array_equal(weight, after[name])


@with_torchao
@pytest.mark.usefixtures("alone")
def test_experts_and_their_routers_stay_in_bfloat16(models: dict[str, str]) -> None:
    backend = start(models["qwen3_moe"], options=FsdpConfig(float8="tensorwise", float8_emulation=True), dtype="bfloat16")
    kinds = {name: type(module).__name__ for name, module in backend._model.named_modules()}
    assert not [name for name, kind in kinds.items() if "Float8" in kind and "mlp" in name]
    assert [name for name, kind in kinds.items() if "Float8" in kind]


@pytest.mark.usefixtures("alone")
def test_a_rank_refuses_what_a_plan_did_not_see(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda _name: object())
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.9"):
        start(models["qwen3-untied"], options=FsdpConfig(float8="rowwise"), dtype="bfloat16")
