"""Refusals of adapters that this backend does not build. Imports no torch, because the controller uses it while it plans."""

from typing import Any

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine_megatron.options import MegatronConfig


def refuse_adapters(options: MegatronConfig, config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for what `model.lora` asks for and this backend's adapters do not have."""
    if model.lora is None:
        return
    for key, asked, instead in (
        ("dropout", model.lora.dropout, "Set model.lora.dropout = 0.0"),
        ("load_in_4bit", model.lora.load_in_4bit, "Remove model.lora.load_in_4bit"),
    ):
        if asked:
            raise UnsupportedError(
                f"model.lora.{key} is set, and the adapters of the megatron backend do not have it",
                remedy=f'{instead}, or set backend.use = "fsdp"',
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
