"""The Hugging Face models that the Megatron backend builds, and the layouts that can divide them.

Imports no torch, because the controller uses it while it plans.
"""

from collections.abc import Iterator
from typing import Any, Final

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.vision_language import refuse_short_first_piece, refuse_unequal_parts
from skyrl_engine_megatron.options import MegatronConfig

MIXTURE_FAMILY: Final = "qwen3_moe"
"""`model_type` of the models with experts in place of feed-forward layers."""

VISION_FAMILY: Final = "qwen3_vl"
"""`model_type` of the vision-language models."""

FAMILIES: Final = ("llama", "qwen2", "qwen3", MIXTURE_FAMILY, VISION_FAMILY)
"""`model_type` of the configurations that are supported; that of Qwen2.5 is "qwen2"."""

_ROPE_TYPES: Final = ("default", "linear", "llama3")
_CHOOSE: Final = "Use the fsdp backend, or another model"


def refuse_model(options: "MegatronConfig", config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for a `transformers.PretrainedConfig` that cannot be built exactly, or not be divided as `options` say."""
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"{model.path} is a {config.model_type} model; the megatron backend knows {', '.join(FAMILIES)}", remedy=_CHOOSE
        )
    if model.lora is not None:
        raise UnsupportedError(
            "the megatron backend trains no adapters", remedy='Remove model.lora, or set backend.use to "fsdp" or "deepspeed"'
        )
    if model.neftune_alpha is not None:
        raise UnsupportedError(
            "the megatron backend adds no noise to embeddings",
            remedy='Remove model.neftune_alpha, or set backend.use to "fsdp" or "deepspeed"',
        )
    refuse_unlike_attention(options, model)
    if model.compile and config.model_type in (MIXTURE_FAMILY, VISION_FAMILY):
        kind = "is a mixture of experts" if config.model_type == MIXTURE_FAMILY else "takes images"
        raise UnsupportedError(
            f"{model.path} {kind}, and no test shows that compiled such models compute the same", remedy="Set model.compile = false"
        )
    if options.attention == "transformer_engine" and model.dtype != "bfloat16":
        raise UnsupportedError(
            f'backend.attention = "transformer_engine" computes in bfloat16, and model.dtype is {model.dtype}',
            remedy='Set model.dtype to bfloat16, or backend.attention to "auto"',
        )
    _refuse_layout(options, config, model.path)
    _refuse_experts(options, config, model)
    for peculiarity in _peculiarities(config.get_text_config(decoder=True), config.model_type):
        raise UnsupportedError(f"{model.path} has {peculiarity}, which the megatron backend does not build", remedy=_CHOOSE)


def refuse_unlike_attention(options: "MegatronConfig", model: ModelConfig) -> None:
    """Raises UnsupportedError where both `model.attention` and `backend.attention` choose, and for a kernel that does not divide documents."""
    if model.attention == "auto":
        return
    chosen = f'model.attention = "{model.attention}"'
    if options.attention != "auto":
        raise UnsupportedError(
            f'{chosen} and backend.attention = "{options.attention}" both choose the attention kernel', remedy="Remove one of them"
        )
    if options.context_parallel > 1 and model.attention != "sdpa":
        raise UnsupportedError(
            f"{chosen}, and backend.context_parallel = {options.context_parallel} divides documents among ranks, which that kernel does not",
            remedy='Set backend.context_parallel = 1, or model.attention to "auto" or "sdpa"',
        )


def _refuse_layout(options: "MegatronConfig", config: Any, name: str) -> None:
    shared = ["num_attention_heads", "num_key_value_heads"]
    if config.model_type != MIXTURE_FAMILY:
        shared.append("intermediate_size")
    elif not options.whole_experts:
        shared.append("moe_intermediate_size")
    for attribute in shared:
        refuse_unequal_parts(config, name, attribute, parts=options.tensor_parallel, options="backend.tensor_parallel")
    if options.whole_experts:
        refuse_unequal_parts(config, name, "num_experts", parts=options.expert_parallel, options="backend.expert_parallel")
    pieces = options.pipeline_parallel * options.virtual_pipeline
    stages = "backend.pipeline_parallel" + (" x backend.virtual_pipeline" if options.virtual_pipeline > 1 else "")
    refuse_unequal_parts(config, name, "num_hidden_layers", parts=pieces, options=stages)
    refuse_short_first_piece(config, name, pieces=pieces)


def _refuse_experts(options: "MegatronConfig", config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for options of experts if the model has none, and for experts in float64."""
    if config.model_type == MIXTURE_FAMILY:
        if model.dtype == "float64":
            raise UnsupportedError(
                f"{model.path} is a mixture of experts, which transformers does not compute in float64",
                remedy="Set model.dtype to float32",
            )
        return
    for option, none in (("expert_parallel", 1), ("router_balance_coefficient", 0.0), ("router_z_coefficient", 0.0)):
        if (value := getattr(options, option)) != none:
            raise UnsupportedError(
                f"backend.{option} = {value}, and {model.path} has no experts", remedy=f"Set backend.{option} to {none:g}"
            )


def _peculiarities(config: Any, family: str) -> Iterator[str]:
    """Yield the features that the configuration of a supported family asks for and the Megatron model would leave out."""
    if config.hidden_act != "silu":
        yield f"the activation {config.hidden_act}"
    if getattr(config, "attention_bias", False):
        yield "biases on its attention's projections"
    if getattr(config, "mlp_bias", False):
        yield "biases on its feed-forward layers"
    if getattr(config, "attention_dropout", 0.0):
        yield f'dropout of {config.attention_dropout} on its attention (model.dropout = "off" switches it off)'
    if family == MIXTURE_FAMILY and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        yield "layers without experts next to layers that have some"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        yield "layers that attend in a sliding window"
    rope = config.rope_parameters["rope_type"]
    if rope not in _ROPE_TYPES:
        yield f"rotary positions of type {rope}"


def refuse_trees(options: MegatronConfig) -> None:
    """Raises UnsupportedError for options with which rows of trees cannot be computed: context parallelism, Transformer Engine's kernels."""
    if options.context_parallel > 1:
        raise UnsupportedError(
            f"backend.context_parallel = {options.context_parallel} divides every sample, and samples that share prefixes lie in pieces",
            remedy="Set backend.context_parallel = 1, or choose the collator packed",
        )
    if options.attention == "transformer_engine":
        raise UnsupportedError(
            'backend.attention = "transformer_engine" attends within documents, and rows of shared prefixes are trees of them',
            remedy='Set backend.attention = "auto", or choose the collator packed',
        )
