"""The architecture of a Megatron model, read from a Hugging Face configuration."""

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine import ModelError
from skyrl_engine_megatron.limits import MIXTURE_FAMILY, VISION_FAMILY
from skyrl_engine_megatron.vision import Vision


@frozen
class Mixture:
    """A mixture of `count` experts, gated SiLU feed-forward networks of width `feed_forward`.

    Each token passes through `chosen` of them, weighted by the router's probabilities; if `normalized`, a token's weights are scaled to sum
    to 1.
    """

    count: int
    chosen: int
    feed_forward: int
    normalized: bool


@frozen(eq=False)
class Architecture:
    """A decoder: pre-norm RMSNorm, rotary positions, grouped-query attention, gated SiLU feed-forward, or a mixture of such
    experts, in every layer.

    `inverse_frequencies` float32[head_size / 2] are those of the rotary positions, with their scaling. `padding` is the token whose embedding
    gets no gradient from lookups in transformers. `prefix` begins the names of the decoder's parameters in Hugging Face's model.
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

    def pad_vocabulary(self, tensor_parallel: int) -> int:
        """Return the vocabulary size rounded up to a multiple of the tensor-parallel ranks."""
        return -(-self.vocabulary // tensor_parallel) * tensor_parallel


def architecture_of(config: Any, name: str) -> Architecture:
    """Return the architecture of a `transformers.PretrainedConfig` that `limits.refuse_model` has accepted.

    Raises ModelError if its numbers contradict each other.
    """
    text = config.get_text_config(decoder=True)
    if text.num_attention_heads % text.num_key_value_heads:
        raise ModelError(
            f"{name} has {text.num_attention_heads} attention heads over {text.num_key_value_heads} key and value heads",
            remedy="Correct the model's config.json",
        )
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
        query_key_norms=config.model_type in ("qwen3", MIXTURE_FAMILY, VISION_FAMILY),
        mixture=_mixture(config),
        inverse_frequencies=_inverse_frequencies(text),
        vision=Vision.of(config, name) if config.model_type == VISION_FAMILY else None,
    )


def _mixture(config: Any) -> Mixture | None:
    if config.model_type != MIXTURE_FAMILY:
        return None
    return Mixture(config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob))


def _inverse_frequencies(config: Any) -> Tensor:
    """Return the inverse frequencies that transformers computes, so that every static kind of scaling it supports is right."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("cpu"):
        rotary = LlamaRotaryEmbedding(config)
    assert rotary.attention_scaling == 1.0, f"rotary positions of type {rotary.rope_type} scale attention"
    frequencies: Tensor = rotary.inv_freq.detach().float().clone()
    return frequencies
