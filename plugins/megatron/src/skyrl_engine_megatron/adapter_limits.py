"""Refusals of adapters that this backend does not build. Imports no torch, because the controller uses it while it plans."""

from typing import Any

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine_megatron.options import MegatronConfig


def refuse_adapters(options: MegatronConfig, config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for what `model.lora` asks for and this backend's adapters do not have."""
    if model.lora is None:
        return
    if model.lora.load_in_4bit:
        raise UnsupportedError(
            "model.lora.load_in_4bit is set, and the adapters of the megatron backend do not have it",
            remedy='Remove model.lora.load_in_4bit, or set backend.use = "fsdp"',
        )
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None) is not None:
        raise UnsupportedError(
            f"{model.path} has latent attention, beside which the megatron backend builds no adapters",
            remedy='Remove model.lora, or set backend.use = "fsdp"',
        )
    heads = text.num_key_value_heads
    if options.tensor_parallel > heads:
        raise UnsupportedError(
            f"backend.tensor_parallel = {options.tensor_parallel} divides each of num_key_value_heads = {heads} of {model.path}, and adapters "
            "beside such heads are not built",
            remedy=f"Set backend.tensor_parallel to {heads} or less, or remove model.lora",
        )
    if model.compile:
        raise UnsupportedError(
            "model.compile is set with model.lora, and no test shows that compiled layers with adapters compute the same",
            remedy="Set model.compile = false",
        )


def refuse_dropout_in_trees(model: ModelConfig) -> None:
    """Raises UnsupportedError for dropout where samples share prefixes: a shared token is computed once."""
    if model.lora is not None and model.lora.dropout:
        raise UnsupportedError(
            f"model.lora.dropout = {model.lora.dropout:g} drops inputs of every sample for itself, and samples that share a prefix would drop "
            f"the same of it",
            remedy="Set model.lora.dropout = 0.0, or choose the collator packed",
        )
