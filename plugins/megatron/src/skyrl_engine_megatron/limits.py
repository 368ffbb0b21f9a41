"""The Hugging Face models that the Megatron backend builds, and the layouts that can divide them.

Imports no torch, because the controller uses it while it plans.
"""

from typing import Any, Final

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.dropout import find_shares
from skyrl_engine.model_facts.vision_language import refuse_short_first_piece, refuse_unequal_parts
from skyrl_engine_megatron.adapter_limits import refuse_adapters
from skyrl_engine_megatron.families import (
    FAMILIES,
    VISION_FAMILIES,
    Family,
    has_plain_attention,
    layers_with_experts,
    name_peculiarities,
)
from skyrl_engine_megatron.options import MegatronConfig

_CHOOSE: Final = "Use the fsdp backend, or another model"


def refuse_model(options: "MegatronConfig", config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for a `transformers.PretrainedConfig` that cannot be built exactly, or not be divided as `options` say."""
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"{model.path} is a {config.model_type} model; the megatron backend knows {', '.join(FAMILIES)}", remedy=_CHOOSE
        )
    refuse_adapters(options, config, model)
    refuse_unlike_attention(options, model)
    text, family = config.get_text_config(decoder=True), FAMILIES[config.model_type]
    if family.sinks and model.attention not in ("auto", "sdpa"):
        raise UnsupportedError(
            f'{model.path} has sinks of attention, which model.attention = "{model.attention}" does not compute',
            remedy='Set model.attention = "auto"',
        )
    if model.compile and not family.compiles:
        kind = "is a mixture of experts" if family.mixture is not None else f"is a {config.model_type} model"
        kind = "takes images" if config.model_type in VISION_FAMILIES else kind
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
    _refuse_kernels(options, text, family, model.path)
    for peculiarity in name_peculiarities(text, family):
        raise UnsupportedError(f"{model.path} has {peculiarity}, which the megatron backend does not build", remedy=_CHOOSE)
    for key, share in find_shares(text.to_dict()).items():
        raise UnsupportedError(
            f"{model.path} has dropout of {share:g} ({key}), which the megatron backend does not build",
            remedy='Set model.dropout = "off", or use the fsdp backend',
        )


def _refuse_kernels(options: "MegatronConfig", text: Any, family: Family, name: str) -> None:
    """Raises UnsupportedError for Transformer Engine's attention in models whose windows or scales no comparison with it covers."""
    if options.attention == "transformer_engine" and not has_plain_attention(text, family):
        raise UnsupportedError(
            f'{name} attends in windows, with sinks or with a scale of its own, and backend.attention = "transformer_engine" is compared '
            f"without them",
            remedy='Set backend.attention to "auto"',
        )


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
    text, family = config.get_text_config(decoder=True), FAMILIES[config.model_type]
    shared, mixture, with_experts = ["num_attention_heads"], family.mixture, layers_with_experts(text, family)
    if not all(with_experts):
        shared.append("intermediate_size")
    if mixture is not None and mixture.shared is not None:
        shared.append(mixture.shared_width)
    if mixture is not None and not options.whole_experts:
        shared.append(mixture.width)
    for attribute in shared:
        refuse_unequal_parts(config, name, attribute, parts=options.tensor_parallel, options="backend.tensor_parallel")
    _refuse_key_heads(options, config, name)
    if mixture is not None and options.whole_experts:
        refuse_unequal_parts(config, name, mixture.count, parts=options.expert_parallel, options="backend.expert_parallel")
    pieces = options.pipeline_parallel * options.virtual_pipeline
    stages = "backend.pipeline_parallel" + (" x backend.virtual_pipeline" if options.virtual_pipeline > 1 else "")
    layers = text.num_hidden_layers
    if layers < pieces:
        raise UnsupportedError(
            f"{stages} = {pieces} leaves pieces without a layer: num_hidden_layers = {layers} of {name}",
            remedy=f"Set {stages} to {layers} at most",
        )
    refuse_short_first_piece(config, name, pieces=pieces)


def _refuse_key_heads(options: "MegatronConfig", config: Any, name: str) -> None:
    """Raises UnsupportedError for key heads that ranks can neither divide nor share: several ranks may have the same one."""
    text, ranks = config.get_text_config(decoder=True), options.tensor_parallel
    heads = text.num_key_value_heads
    if ranks <= heads or ranks % heads:
        refuse_unequal_parts(config, name, "num_key_value_heads", parts=ranks, options="backend.tensor_parallel")
    elif FAMILIES[config.model_type].query_key_norms == "whole":
        raise UnsupportedError(
            f"{name} normalises keys over all of its {heads} key heads, and backend.tensor_parallel = {ranks} ranks share them",
            remedy=f"Set backend.tensor_parallel to a divisor of {heads}",
        )


def _refuse_experts(options: "MegatronConfig", config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for options of experts if the model has none, and for experts in float64."""
    if FAMILIES[config.model_type].mixture is not None:
        if model.dtype == "float64":
            raise UnsupportedError(
                f"{model.path} is a mixture of experts, which transformers does not compute in float64",
                remedy="Set model.dtype to float32",
            )
        _refuse_bias_rate(options, config, model)
        return
    for option, none in (
        ("expert_parallel", 1),
        ("router_balance_coefficient", 0.0),
        ("router_z_coefficient", 0.0),
        ("router_bias_rate", 0.0),
    ):
        if (value := getattr(options, option)) != none:
            raise UnsupportedError(
                f"backend.{option} = {value}, and {model.path} has no experts", remedy=f"Set backend.{option} to {none:g}"
            )


def _refuse_bias_rate(options: "MegatronConfig", config: Any, model: ModelConfig) -> None:
    """Raises UnsupportedError for a rate of biases that routers do not have, or that an export of adapters would lose."""
    if not options.router_bias_rate:
        return
    mixture = FAMILIES[config.model_type].mixture
    if mixture is None or not mixture.corrected:
        raise UnsupportedError(
            f"backend.router_bias_rate = {options.router_bias_rate:g}, and routers of {model.path} choose by no bias beside their scores",
            remedy="Set backend.router_bias_rate = 0, or backend.router_balance_coefficient, which is a loss",
        )
    if model.lora is not None:
        raise UnsupportedError(
            f"backend.router_bias_rate = {options.router_bias_rate:g} changes the model under the adapters, whose export holds adapters alone",
            remedy="Set backend.router_bias_rate = 0, or remove model.lora",
        )


def refuse_trees_of_model(config: Any, name: str) -> None:
    """Raises UnsupportedError for rows of trees if attention has sinks: they are given to documents."""
    if config.model_type in FAMILIES and FAMILIES[config.model_type].sinks:
        raise UnsupportedError(
            f"{name} has sinks of attention, which are computed within documents, and rows of shared prefixes are trees of them",
            remedy="Choose the collator packed",
        )


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
