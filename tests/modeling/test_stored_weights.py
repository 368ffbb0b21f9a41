"""Parts of a model's files, read alone, are parts of the weights that loading the model whole gives, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import FAMILIES
from safetensors import safe_open
from torch import nn

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.modeling import stored_weights
from skyrl_engine.modeling.layer_kinds import shorten_to_kinds
from skyrl_engine.modeling.loading import build_causal_lm, check_first_layers, load_scorer, load_without_weights
from skyrl_engine.modeling.named_tensors import entry, list_named_tensors
from skyrl_engine.modeling.stored_weights import StoredTensor
from skyrl_engine.modeling.tiny import make_parts_differ, write_model, write_vision_model

BY_DAY = ("qwen3", "qwen3_moe")
RANKS = 3


def require_equal(spec: ModelConfig, *, images: bool = False) -> None:
    """Compare every tensor, whole and in parts along the first dimension, and what is found about packed rows."""
    whole, scorer = load_scorer(spec, images=images, seed=5)
    loaded = load_without_weights(spec, images=images, seed=5)
    assert not isinstance(loaded, str), loaded
    model, skeleton, stored = loaded
    names = [name for name, _ in list_named_tensors(whole)]
    assert [name for name, _ in list_named_tensors(model)] == names
    for name in names:
        due, place = entry(whole, name), entry(model, name)
        assert (place.shape, place.dtype) == (due.shape, due.dtype)
        assert place.requires_grad == due.requires_grad
        if name not in stored:
            assert not place.is_meta, name
            assert torch.equal(place, due), name
            continue
        assert place.is_meta
        assert torch.equal(stored.read(name, place), due), name
        if due.ndim:
            share = -(-len(due) // RANKS)
            rest = tuple(slice(0, size) for size in due.shape[1:])
            for rank in range(RANKS):
                start, stop = (min(len(due), share * number) for number in (rank, rank + 1))
                part = stored.read(name, place, (slice(start, stop), *rest))
                assert torch.equal(part, due[start:stop]), name
                assert part.dtype == due.dtype
    assert check_first_layers(spec, skeleton.decoder, stored, images=images) == scorer.segment_support


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.nightly]) for name in sorted({*FAMILIES, *BY_DAY})]
)
def test_weights_of_a_family(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, family, **FAMILIES.get(family, {}))
    # amplified, its weights fail the check at load in either way
    if family != "recurrent_gemma":
        make_parts_differ(tmp_path)
    require_equal(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({}, {"dtype": "bfloat16", "lora": LoraConfig(rank=2)}),
        ({"value_head": True}, {"dtype": "float64", "value_head": True}),
        ({}, {"value_head": True, "freeze": ("*.mlp.*",)}),
    ],
    ids=["adapters", "critic in float64", "fresh critic, partly frozen"],
)
def test_what_training_adds(tmp_path: Path, settings: dict[str, Any], model: dict[str, Any]) -> None:
    write_model(tmp_path, "llama", **settings)
    require_equal(ModelConfig(str(tmp_path), **model))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_sees_images(tmp_path: Path, tied: bool) -> None:
    write_vision_model(tmp_path, tied=tied)
    require_equal(ModelConfig(str(tmp_path)), images=True)


def test_a_rank_reads_the_experts_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files hold every expert's matrices apart, and the model stacks them."""
    write_model(tmp_path, "qwen3_moe", **FAMILIES["qwen3_moe"])
    loaded = load_without_weights(ModelConfig(str(tmp_path)))
    assert not isinstance(loaded, str)
    model, _, stored = loaded
    read: list[str] = []
    whole = StoredTensor.read

    def record(tensor: StoredTensor, region: Any = ()) -> torch.Tensor:
        read.append(tensor.name)
        return whole(tensor, region)

    monkeypatch.setattr(StoredTensor, "read", record)
    name = next(name for name, _ in model.named_parameters() if name.endswith("experts.gate_up_proj"))
    place = entry(model, name)
    stored.read(name, place, (slice(1, 2), *(slice(0, size) for size in place.shape[1:])))
    assert sorted(key.rpartition("experts.")[2] for key in read) == ["1.gate_proj.weight", "1.up_proj.weight"]


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("gemma3_text", 6)])
def test_the_first_layers_show_every_kind(tmp_path: Path, family: str, layers: int) -> None:
    write_model(tmp_path, family, num_hidden_layers=14)
    spec = ModelConfig(str(tmp_path))

    def build(config: Any) -> nn.Module:
        with torch.device("meta"):
            return build_causal_lm(spec, config)  # type: ignore[no-any-return] # a model of transformers

    config, model = shorten_to_kinds(load_config(spec), build)
    assert config.num_hidden_layers == len(model.model.layers) == layers
    loaded = load_without_weights(spec)
    assert not isinstance(loaded, str)
    assert check_first_layers(spec, loaded[1].decoder, loaded[2]).layers == 14


def test_what_is_loaded_whole_says_why(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    dora = load_without_weights(ModelConfig(str(tmp_path), lora=LoraConfig(rank=2, dora=True)))
    assert dora == "its adapters start at values of its weights"


def test_a_file_that_lost_a_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_model(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of its weights, model.norm.weight first"):
        load_without_weights(ModelConfig(str(tmp_path)))


def test_a_file_stays_open_while_its_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening one reads what it says of all its tensors; it is opened again when as much was read as may be mapped at once."""
    write_model(tmp_path, "llama")
    loaded = load_without_weights(ModelConfig(str(tmp_path)))
    assert not isinstance(loaded, str)
    model, _, stored = loaded
    opened: list[Path] = []

    def note(file: Path, framework: str) -> Any:
        opened.append(file)
        return safe_open(file, framework=framework)

    monkeypatch.setattr(stored_weights, "safe_open", note)
    names = [name for name, _ in model.named_parameters()]
    parts = [stored.read(name, entry(model, name)) for name in names]
    assert opened == [tmp_path / "model.safetensors"]
    assert all(part.abs().sum() for part in parts), "they are there when the file was opened again"
    monkeypatch.setattr(stored_weights, "MOST_MAPPED", 1)
    for name, part in zip(names, parts, strict=True):
        assert torch.equal(stored.read(name, entry(model, name)), part)
    assert len(opened) == 1 + len(names)
