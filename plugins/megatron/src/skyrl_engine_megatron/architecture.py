"""From a Hugging Face configuration to the facts that a Megatron model is built of, or to the sentence that says why it cannot be."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine_megatron.plugin import FAMILIES, VISION_FAMILY, MegatronConfig
from skyrl_engine_megatron.vision import Vision

_ROPE_TYPES: Final = ("default", "linear", "llama3")
_CHOOSE: Final = "Use the fsdp backend, or another model"


@frozen
class Mixture:
    """`count` experts of gated SiLU feed-forward, of which every token goes through `chosen`, weighted by the router's probabilities.

    `normalized`: the weights of a token's chosen experts add up to 1.
    """

    count: int
    chosen: int
    feed_forward: int
    normalized: bool


@frozen(eq=False)
class Architecture:
    """A decoder: pre-norm RMSNorm, rotary positions, grouped-query attention, gated SiLU feed-forward, or a mixture of such
    experts, in every layer.

    `inverse_frequencies` float32[head_size / 2] are those of the rotary positions, scaling included. `padding` is the token whose embedding
    transformers never learns from being read. `prefix` begins the decoder's names in Hugging Face's model.
    """

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    longest: int
    epsilon: float
    tied: bool
    padding: int | None
    query_key_value_bias: bool
    query_key_norms: bool
    mixture: Mixture | None
    inverse_frequencies: Tensor
    vision: Vision | None = None

    @property
    def prefix(self) -> str:
        return "model." if self.vision is None else "model.language_model."

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """The vocabulary filled up to what tensor-parallel ranks can share equally."""
        return -(-self.vocabulary // tensor_parallel) * tensor_parallel


def architecture_of(config: Any, name: str) -> Architecture:
    """The architecture that a `transformers.PretrainedConfig` describes. Raises UnsupportedError for what would be lost, with its name."""
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"{name} is a {config.model_type} model; the megatron backend knows {', '.join(FAMILIES)}", remedy=_CHOOSE
        )
    text = config.get_text_config(decoder=True)
    for what in _peculiarities(text, config.model_type):
        raise UnsupportedError(f"{name} has {what}, which the megatron backend does not build", remedy=_CHOOSE)
    return Architecture(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        key_heads=text.num_key_value_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        feed_forward=text.intermediate_size,
        vocabulary=text.vocab_size,
        longest=text.max_position_embeddings,
        epsilon=text.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        padding=text.pad_token_id,
        query_key_value_bias=config.model_type == "qwen2",
        query_key_norms=config.model_type in ("qwen3", "qwen3_moe", VISION_FAMILY),
        mixture=_mixture(config),
        inverse_frequencies=_inverse_frequencies(text, name),
        vision=Vision.of(config, name) if config.model_type == VISION_FAMILY else None,
    )


def _peculiarities(config: Any, family: str) -> Iterator[str]:
    """What a configuration of a known family may ask for and the Megatron model would leave out."""
    if config.hidden_act != "silu":
        yield f"the activation {config.hidden_act}"
    if getattr(config, "attention_bias", False):
        yield "biases on its attention's projections"
    if getattr(config, "mlp_bias", False):
        yield "biases on its feed-forward layers"
    if getattr(config, "attention_dropout", 0.0):
        yield f"dropout of {config.attention_dropout} on its attention"
    if family == "qwen3_moe" and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        yield "layers without experts beside those that have some"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        yield "layers that attend in a sliding window"


def _mixture(config: Any) -> Mixture | None:
    if config.model_type != "qwen3_moe":
        return None
    return Mixture(config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob))


def _inverse_frequencies(config: Any, name: str) -> Tensor:
    """As transformers computes them, so that every kind of scaling it knows and does not change on the way is right."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    if rotary.rope_type not in _ROPE_TYPES or rotary.attention_scaling != 1.0:
        raise UnsupportedError(
            f"{name} has rotary positions of type {rotary.rope_type}; the megatron backend knows {', '.join(_ROPE_TYPES)}",
            remedy=_CHOOSE,
        )
    frequencies: Tensor = rotary.inv_freq.detach().float().clone()
    return frequencies


def check_layout(architecture: Architecture, config: MegatronConfig, name: str) -> None:
    """Raises UnsupportedError where the model cannot be divided into the layout's equal parts; names the capability and the size."""
    shares = {
        "attention heads": architecture.heads,
        "key and value heads": architecture.key_heads,
        **_feed_forward_shares(architecture, config),
    }
    for what, count in shares.items():
        if count % config.tensor_parallel:
            raise UnsupportedError(
                f"tensor_parallel = {config.tensor_parallel} does not divide the {count} {what} of {name}",
                remedy="Set backend.tensor_parallel to a divisor of them",
            )
    if architecture.mixture is None and config.expert_parallel > 1:
        raise UnsupportedError(
            f"expert_parallel = {config.expert_parallel}, and {name} has no experts", remedy="Set backend.expert_parallel to 1"
        )
    if architecture.mixture is None and config.router_losses:
        name_of = "router_balance_coefficient" if config.router_balance_coefficient else "router_z_coefficient"
        raise UnsupportedError(
            f"{name_of} = {getattr(config, name_of)}, and {name} has no experts", remedy=f"Set backend.{name_of} to 0"
        )
    pieces = config.pipeline_parallel * config.virtual_pipeline
    if architecture.layers % pieces:
        interleaved = f" x virtual_pipeline = {config.virtual_pipeline}" if config.virtual_pipeline > 1 else ""
        raise UnsupportedError(
            f"pipeline_parallel = {config.pipeline_parallel}{interleaved} does not divide the {architecture.layers} layers of {name}",
            remedy="Set the backend's pipeline sizes so that their product divides the layers",
        )
    if architecture.vision is not None and architecture.layers // pieces < architecture.vision.levels:
        raise UnsupportedError(
            f"{name} adds image features to its first {architecture.vision.levels} layers, and pipeline_parallel x virtual_pipeline = "
            f"{pieces} leaves {architecture.layers // pieces} to the stage that sees the images",
            remedy="Make the backend's pipeline sizes smaller",
        )


def _feed_forward_shares(architecture: Architecture, config: MegatronConfig) -> dict[str, int]:
    if architecture.mixture is None:
        return {"feed-forward columns": architecture.feed_forward}
    if config.whole_experts:
        return {"experts": architecture.mixture.count}
    return {"feed-forward columns of every expert": architecture.mixture.feed_forward}


def check_shapes(architecture: Architecture, name: str) -> None:
    """Raises ModelError for head counts that contradict each other."""
    if architecture.heads % architecture.key_heads:
        raise ModelError(
            f"{name} has {architecture.heads} attention heads over {architecture.key_heads} key and value heads",
            remedy="Correct the model's config.json",
        )
