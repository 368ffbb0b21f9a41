"""An export loads in transformers as it was given, whatever the model that writes it computes with."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from skyrl_engine.modeling.exporting import write_pretrained


def model(dtype: torch.dtype) -> Qwen3ForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=32, head_dim=8, **sizes)).to(dtype)


@pytest.mark.parametrize("computes", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_precision_of_the_weights_is_the_one_that_is_loaded(tmp_path: Path, computes: torch.dtype, dtype: torch.dtype) -> None:
    weights = {name: torch.randn(tensor.shape, dtype=dtype) for name, tensor in model(computes).state_dict().items()}
    writer = model(computes)
    write_pretrained(writer, tmp_path, weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)
    assert writer.dtype == computes


def test_without_weights_of_their_own_it_writes_those_of_the_model(tmp_path: Path) -> None:
    writer = model(torch.bfloat16)
    write_pretrained(writer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, writer.state_dict()[name], rtol=0, atol=0)


def test_nothing_is_imported_of_backends_that_the_run_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers unwraps what it saves by accelerate, which imports DeepSpeed wherever it is installed."""
    names: list[str] = []
    original = builtins.__import__

    def note_import(name: str, *arguments: Any, **named: Any) -> Any:
        names.append(name.partition(".")[0])
        return original(name, *arguments, **named)

    writer = model(torch.float32)
    monkeypatch.setattr(builtins, "__import__", note_import)
    write_pretrained(writer, tmp_path, dict(writer.state_dict()), precision="bfloat16")
    assert "deepspeed" not in names
