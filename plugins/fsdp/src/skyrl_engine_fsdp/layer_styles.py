"""How transformers plans to cut a model's layers, and which models tensor-parallel ranks cannot share. Imports no torch: planning asks too."""

from collections.abc import Mapping
from typing import Any, Final

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.vision_language import refuse_unequal_parts

COLUMNS, ROWS, LOCAL_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Styles of transformers' plans: a linear layer cut along its outputs, one along its inputs, and weights that every rank has whole and applies
to its own heads alone (Qwen3 normalises queries and keys so): their gradient is the sum of what the ranks' heads give."""

_DIVIDED: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes of a decoder that tensor-parallel ranks share equally."""


def styles_of(config: Any) -> Mapping[str, str]:
    """The style of each module by a pattern such as "layers.*.mlp.up_proj", from a `transformers.PretrainedConfig`; empty without a plan."""
    return dict(getattr(config.get_text_config(decoder=True), "base_model_tp_plan", None) or {})


def refuse_model(ranks: int, config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for a model that `ranks`, more than one, cannot share: adapters, no plan, unknown styles, unequal parts."""
    if model.lora is not None:
        raise UnsupportedError(
            "the fsdp backend trains no adapters under tensor parallelism",
            remedy="Set backend.tensor_parallel = 1, or remove model.lora",
        )
    styles, family = styles_of(config), config.get_text_config(decoder=True).model_type
    if not styles:
        raise cannot_be_cut(f"transformers has no tensor-parallel plan for {family} models such as {model.path}")
    unknown = sorted((style, pattern) for pattern, style in styles.items() if style not in {COLUMNS, ROWS, LOCAL_HEADS})
    if unknown:
        style, pattern = unknown[0]
        raise cannot_be_cut(
            f"{family} models such as {model.path} divide {pattern} by {style!r}, which the fsdp backend does not know"
        )
    for attribute in _DIVIDED:
        refuse_unequal_parts(config, model.path, attribute, parts=ranks, options="backend.tensor_parallel")


def cannot_be_cut(cause: str) -> UnsupportedError:
    """With the remedies that every such model has."""
    return UnsupportedError(cause, remedy="Set backend.tensor_parallel = 1, or choose another model or backend")
