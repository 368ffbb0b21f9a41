"""Adapters for tests of backends, and the same model as PEFT makes it."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.modeling.exporting import write_pretrained
from skyrl_engine.modeling.loading import load_scorer


def write_adapter(model: str, target: Path, *, value_head: bool = False, layers: list[int] | None = None) -> str:
    """Write a PEFT directory of rank-4 adapters for a model. Both matrices are random: with B zero, as in new adapters, A has no gradient.

    `layers` get adapters, by default all. With `value_head` the directory also holds the model's own value head.
    """
    model_with_adapters, _ = load_scorer(ModelConfig(model, value_head=value_head, lora=LoraConfig(rank=4, alpha=8)), images=True)
    write_pretrained(model_with_adapters, target)
    path = target / "adapter_model.safetensors"
    draw = torch.Generator().manual_seed(3)
    stored = {}
    for name, tensor in sorted(load_file(path).items()):
        values = 0.1 * torch.randn(tensor.shape, generator=draw) if ".lora_" in name else tensor
        if layers is None or ".lora_" not in name or any(f".layers.{layer}." in name for layer in layers):
            stored[name] = values
    save_file(stored, path, metadata={"format": "pt"})
    configuration = target / "adapter_config.json"
    configuration.write_text(json.dumps({**json.loads(configuration.read_text()), "layers_to_transform": layers}))
    return str(target)


def with_adapter(model: Any, adapter: str) -> Any:
    """Return `model` with the adapters of a directory put in by PEFT; parameters keep their names inside `model`."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for what it calls by a newer name
        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).base_model.model
