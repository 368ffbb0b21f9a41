"""Adapters for tests of backends, and the same model as PEFT makes it."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.modeling.exporting import write_pretrained
from skyrl_engine.modeling.loading import load_scorer

BLOCK = 64
"""Numbers of a weight that share a scale in 4 bits."""


def write_adapter(
    model: str,
    target: Path,
    *,
    value_head: bool = False,
    layers: list[int] | None = None,
    rslora: bool = False,
    dora: bool = False,
    targets: tuple[str, ...] | None = None,
) -> str:
    """Write a PEFT directory of rank-4 adapters for a model. Both matrices are random: with B zero, as in new adapters, A has no gradient.

    `layers` get adapters, by default all, and of them the linear layers `targets`, by default all. With `value_head` the directory also holds
    the model's own value head. Magnitudes of DoRA are those of the base weights, changed by a tenth.
    """
    lora = LoraConfig(rank=4, alpha=8, rslora=rslora, dora=dora, targets=targets)
    model_with_adapters, _ = load_scorer(ModelConfig(model, value_head=value_head, lora=lora), images=True)
    write_pretrained(model_with_adapters, target)
    path = target / "adapter_model.safetensors"
    draw = torch.Generator().manual_seed(3)
    stored = {}
    for name, tensor in sorted(load_file(path).items()):
        values = 0.1 * torch.randn(tensor.shape, generator=draw) if ".lora_" in name else tensor
        if "magnitude" in name:
            values = tensor * (1 + values)
        if layers is None or ".lora_" not in name or any(f".layers.{layer}." in name for layer in layers):
            stored[name] = values
    save_file(stored, path, metadata={"format": "pt"})
    configuration = target / "adapter_config.json"
    configuration.write_text(json.dumps({**json.loads(configuration.read_text()), "layers_to_transform": layers}))
    return str(target)


def round_to_four_bits(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as 4 bits hold it (NF4, Dettmers et al. 2023, arXiv 2305.14314), by the definition and not by a library.

    Of 64 numbers in a row each is the nearest of 16 levels, times their largest magnitude. Levels are quantiles of a normal distribution: eight
    above zero, zero, and seven below (appendix E).
    """
    blocks = torch.nn.functional.pad(weight.detach().double().reshape(-1), (0, -weight.numel() % BLOCK)).reshape(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    nearest = (blocks[..., None] / scales[..., None] - _list_levels()).abs().argmin(-1)
    return (_list_levels()[nearest] * scales).reshape(-1)[: weight.numel()].reshape(weight.shape).to(weight.dtype)


def _list_levels() -> torch.Tensor:
    """Return the 16 levels of NF4, float64, in order."""
    tail = 0.5 * (1 - 1 / 32 + 1 - 1 / 30)
    above, below = (
        math.sqrt(2) * torch.erfinv(2 * torch.linspace(tail, 0.5, count, dtype=torch.float64)[:-1] - 1) for count in (9, 8)
    )
    levels = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    return levels / levels.max()


def write_rounded_model(model: str, target: Path) -> str:
    """Write a model whose linear layers in the decoder are as 4 bits hold them; all else is that of `model`."""
    from skyrl_engine.modeling.causal_lm import split_causal_lm
    from skyrl_engine.modeling.loading import load_causal_lm

    rounded = load_causal_lm(ModelConfig(model))
    with torch.no_grad():
        for layer in split_causal_lm(rounded).decoder.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(round_to_four_bits(layer.weight))
    write_pretrained(rounded, target)
    return str(target)


def with_adapter(model: Any, adapter: str) -> Any:
    """Return `model` with the adapters of a directory put in by PEFT; parameters keep their names inside `model`."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for what it calls by a newer name
        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).base_model.model
