"""An export holds every tensor of the model that training started from: those that training does not use as they were, under their names."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3_5Config

from skyrl_engine import Engine, ModelError
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.modeling.exporting import quiet_progress
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

COLUMNS = SampleColumns.from_lists(input_ids=[[5, 6, 7, 8], [5, 9, 10]], num_actions=[2, 2])
MTP = {"mtp.fc.weight": (4, 4), "model.layers.2.embed_tokens.weight": (3, 5), "model.layers.2.shared_head.norm.weight": (5,)}
"""Layers that predict several tokens, as checkpoints of several families have them, after a model of two layers."""


def load_stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def with_mtp(tmp_path: Path) -> Path:
    """A Qwen3 whose files hold more than its class uses, in bfloat16, and the embedding a second time, as the head."""
    folder = tmp_path / "source"
    write_model(folder, "qwen3")
    weights = load_file(folder / "model.safetensors")
    weights |= {name: torch.randn(shape).bfloat16() for name, shape in MTP.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, ["a b c"], size=64)
    return folder


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 of the published class, which takes images and is trained on text, with a layer for several tokens."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    text = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    }
    with torch.random.fork_rng(), quiet_progress():
        AutoModelForImageTextToText.from_config(Qwen3_5Config(text_config=text, vision_config=vision)).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["mtp.layers.0.mlp.up_proj.weight"] = torch.randn(96, 48)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    write_tokenizer(folder, ["a b c"], size=64)
    return folder


def train(tables: dict[str, Any], *outputs: Path, before_export: Callable[[], object] = lambda: None) -> None:
    with Engine.open({"optimizer": {"learning_rate": 1e-2}, **tables}) as engine:
        engine.forward_backward(engine.plan(COLUMNS)).result()
        engine.optim_step().result()
        before_export()
        for output in outputs:
            engine.export(output)


def require_whole(source: Path, exported: Path, unused: set[str]) -> None:
    """The same names; what training does not use is the same bytes, and something else was learned."""
    before, after = load_stored(source), load_stored(exported)
    assert after.keys() == before.keys()
    for name in unused:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])
    assert any(not torch.equal(after[name].float(), before[name].float()) for name in before.keys() - unused)


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed", "megatron"])
def test_layers_that_the_class_leaves_out(with_mtp: Path, tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        train({"model": {"path": str(with_mtp)}, "backend": {"use": backend}}, tmp_path / "one", tmp_path / "again")
    for name in ("one", "again"):
        require_whole(with_mtp, tmp_path / name, set(MTP))
        _, report = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not report["missing_keys"]
        assert set(report["unexpected_keys"]) == set(MTP)
    assert "copied 3 tensors that training does not use" in caplog.text
    assert "model.layers (2), mtp.fc (1)" in caplog.text
    # an export is a source like any other
    train({"model": {"path": str(tmp_path / "one")}}, tmp_path / "further")
    require_whole(tmp_path / "one", tmp_path / "further", set(MTP))


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_a_model_that_sees_and_is_trained_on_text(sees: Path, tmp_path: Path, backend: str) -> None:
    """The export is the published class again, with the vision tower that it had, and goes on training as text."""
    train({"model": {"path": str(sees), "dtype": "bfloat16"}, "backend": {"use": backend}}, tmp_path / "out")
    unused = {name for name in load_stored(sees) if "visual" in name or name.startswith("mtp")}
    assert len(unused) > 20
    require_whole(sees, tmp_path / "out", unused)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.architectures == ["Qwen3_5ForConditionalGeneration"]
    assert config.dtype == torch.bfloat16
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    for whole in (AutoModelForImageTextToText, AutoModelForCausalLM):
        model, report = whole.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not report["missing_keys"], whole
        assert torch.equal(
            model.get_input_embeddings().weight.float(),
            load_stored(tmp_path / "out")["model.language_model.embed_tokens.weight"].float(),
        )


def test_a_source_that_is_gone_is_named(with_mtp: Path, tmp_path: Path) -> None:
    """The engine read the names when it started; nothing half is left."""

    def move() -> None:
        with_mtp.rename(tmp_path / "elsewhere")

    with pytest.raises(
        ModelError, match=r"held 3 tensors that training does not use.*model\.layers\.2.* is not there any more"
    ) as caught:
        train({"model": {"path": str(with_mtp)}}, tmp_path / "out", before_export=move)
    assert "--model PATH" in caught.value.remedy
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*partial"))


def test_a_model_that_uses_all_it_holds_needs_no_source(tmp_path: Path) -> None:
    """And stays one file."""
    source = tmp_path / "source"
    write_model(source, "llama")
    write_tokenizer(source, ["a b c"], size=64)
    train({"model": {"path": str(source)}}, tmp_path / "out", before_export=lambda: shutil.rmtree(source))
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


def test_adapters_are_exported_alone(with_mtp: Path, tmp_path: Path) -> None:
    train({"model": {"path": str(with_mtp), "lora": {"rank": 2}}}, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    assert all(".lora_" in name for name in load_stored(tmp_path / "out"))


def test_names_without_the_prefix_and_pickled_files(tmp_path: Path) -> None:
    """GPT-2's published files leave the prefix of the base model out and hold masks that no class uses any more."""
    source = tmp_path / "source"
    write_model(source, "gpt2", n_layer=2, n_head=4, n_embd=48, tie_word_embeddings=True)
    weights = {name.removeprefix("transformer."): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    (source / "model.safetensors").unlink()
    torch.save(weights, source / "pytorch_model.bin")
    write_tokenizer(source, ["a b c"], size=64)
    train({"model": {"path": str(source)}}, tmp_path / "out")
    exported = load_stored(tmp_path / "out")
    assert exported.keys() == weights.keys()
    assert torch.equal(exported["h.0.attn.bias"], weights["h.0.attn.bias"])
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
