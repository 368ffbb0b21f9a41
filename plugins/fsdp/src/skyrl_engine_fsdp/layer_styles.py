"""Styles of transformers' tensor-parallel plans, and the models that the fsdp backend refuses to divide.

Imports no torch, because the controller uses it while it plans.
"""

from collections.abc import Mapping
from typing import Any, Final

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.vision_language import refuse_unequal_parts

COLUMNS, ROWS, LOCAL_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Styles of transformers' plans: a linear layer divided along its outputs; one divided along its inputs; weights that every rank holds whole
and applies to its own heads only, such as Qwen3's norms of queries and keys, whose gradient is the sum over ranks."""

_DIVIDED: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes of a decoder that the number of tensor-parallel ranks must divide."""


def styles_of(config: Any) -> Mapping[str, str]:
    """Return the plan of a `transformers.PretrainedConfig`: a style by module pattern such as "layers.*.mlp.up_proj"; empty without a plan."""
    return dict(getattr(config.get_text_config(decoder=True), "base_model_tp_plan", None) or {})


def refuse_model(ranks: int, config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for a model that `ranks` (2 or more) cannot share: adapters, compiled layers, unknown styles, unequal parts."""
    if model.lora is not None:
        raise UnsupportedError(
            "the fsdp backend trains no adapters under tensor parallelism",
            remedy="Set backend.tensor_parallel = 1, or remove model.lora",
        )
    if model.neftune_alpha is not None:
        raise UnsupportedError(
            "the fsdp backend adds no noise to embeddings under tensor parallelism",
            remedy="Set backend.tensor_parallel = 1, or remove model.neftune_alpha",
        )
    if model.compile:
        raise UnsupportedError(
            "model.compile = true, and torch's compiler cannot follow the DTensors of tensor-parallel layers whose lengths vary",
            remedy="Set backend.tensor_parallel = 1 or model.compile = false, or use the megatron backend",
        )
    styles, family = styles_of(config), config.get_text_config(decoder=True).model_type
    if not styles:
        raise indivisible_error(f"transformers has no tensor-parallel plan for {family} models such as {model.path}")
    unknown = sorted((style, pattern) for pattern, style in styles.items() if style not in {COLUMNS, ROWS, LOCAL_HEADS})
    if unknown:
        style, pattern = unknown[0]
        raise indivisible_error(
            f"{family} models such as {model.path} divide {pattern} by {style!r}, which the fsdp backend does not know"
        )
    for attribute in _DIVIDED:
        refuse_unequal_parts(config, model.path, attribute, parts=ranks, options="backend.tensor_parallel")


def indivisible_error(cause: str) -> UnsupportedError:
    """Return the error for a model that cannot be divided, with the remedies that always apply."""
    return UnsupportedError(cause, remedy="Set backend.tensor_parallel = 1, or choose another model or backend")
