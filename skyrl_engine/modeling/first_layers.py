"""Shorten a model to its first layers, to find the layer at which two backends begin to differ."""

from pathlib import Path
from typing import Any

import attrs

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.modeling.causal_lm import split_causal_lm, transformer_layers
from skyrl_engine.modeling.exporting import write_pretrained
from skyrl_engine.modeling.layer_kinds import shorten
from skyrl_engine.modeling.loading import load_scorer, load_skeleton
from skyrl_engine.modeling.vision import language_part


def layer_names(spec: ModelConfig) -> list[str]:
    """Return the names of the decoder's layers in the model, such as `model.layers.0`, in order. Raises ModelError."""
    model, _ = load_skeleton(_base_spec(spec), images=True)
    name, layers = _find_layer_list(model)
    return [f"{name}.{number}" for number in range(len(layers))]


def write_first_layers(spec: ModelConfig, layers: int, directory: Path) -> None:
    """Write the model with only the first `layers` layers of its decoder, followed by the head, as a Hugging Face directory.

    Raises what loading and writing a model raise.
    """
    model, _ = load_scorer(_base_spec(spec), images=True)
    _, listed = _find_layer_list(model)
    del listed[layers:]
    shorten(model.config, layers)
    write_pretrained(model, directory)


def _base_spec(spec: ModelConfig) -> ModelConfig:
    return attrs.evolve(spec, lora=None, dtype="float32")


def _find_layer_list(model: Any) -> tuple[str, Any]:
    """Return the module that lists the decoder's layers, after its name in the model."""
    first = transformer_layers(language_part(split_causal_lm(model).decoder))[0]
    return next((name, module) for name, module in model.named_modules() if any(child is first for child in module.children()))
