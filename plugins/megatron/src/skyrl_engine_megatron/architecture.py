"""The architecture of a Megatron model, read from a Hugging Face configuration."""

import math
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor

from skyrl_engine import ModelError
from skyrl_engine.model_facts.thresholds import choose_rotary_length
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine_megatron.families import (
    FAMILIES,
    VISION_FAMILIES,
    Family,
    is_on,
    layers_with_experts,
    rotary_tables,
    windowed_layers,
)
from skyrl_engine_megatron.vision import Vision


@frozen
class Mixture:
    """A mixture of `count` experts, gated feed-forward networks of width `feed_forward`, in the layers that `layers` marks.

    Each token passes through `chosen` of them, weighted by the router's probabilities, or sigmoids; if `normalized`, a token's weights are
    scaled to sum to 1, and then multiplied by `factor`. `corrected` routers choose by scores plus a bias, among the `chosen_groups` best of
    `groups` groups. All tokens pass through a shared network of width `shared` too (0: there is none), gated if `shared_gate`. `of_chosen`
    weights are the softmax of the chosen experts' logits. Experts that are `clamped` to this bound are gpt-oss's, whose sigmoid is of `alpha`
    times the gate.
    """

    count: int
    chosen: int
    feed_forward: int
    normalized: bool
    layers: tuple[bool, ...]
    sigmoid: bool = False
    corrected: bool = False
    groups: int = 1
    chosen_groups: int = 1
    factor: float = 1.0
    shared: int = 0
    shared_gate: bool = False
    of_chosen: bool = False
    clamped: float | None = None
    alpha: float = 1.0


@frozen(eq=False)
class RotaryPositions:
    """Rotary positions of some of the layers: `inverse_frequencies` float32[n] rotate the first 2 n numbers of a head, with their scaling.

    Cosines and sines are multiplied by `scaling`, as YaRN (arXiv 2309.00071, section 3.4) and LongRoPE do.
    """

    inverse_frequencies: Tensor
    scaling: float = 1.0


@frozen
class Latent:
    """Sizes of latent attention: a head's numbers without positions (`plain`), with them (`rotated`) and of values; ranks of compressed states.

    Queries are not compressed if `query_rank` is None. `interleaved` files hold pairs of rotated numbers next to each other.
    """

    query_rank: int | None
    key_value_rank: int
    plain: int
    rotated: int
    value_size: int
    interleaved: bool

    @property
    def query_size(self) -> int:
        """Numbers of a query's or key's head."""
        return self.plain + self.rotated

    @classmethod
    def of(cls, text: Any) -> "Latent":
        """Read them from a decoder's configuration."""
        sizes = text.q_lora_rank, text.kv_lora_rank, text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
        return cls(*sizes, interleaved=bool(text.rope_interleave))


@frozen
class Biases:
    """The projections that have biases: of queries, keys and values, of attention's output, and of feed-forward layers."""

    query_key_value: bool
    output: bool
    feed_forward: bool


@frozen(eq=False)
class Architecture:
    """A decoder of RMSNorm, rotary positions, grouped-query attention, and feed-forward layers or a mixture of experts.

    `family` names its tensors and says which norms there are. `rotary` are its kinds of rotary positions, and `rotary_of` gives each layer's
    kind, None for a layer without positions; kinds rotate equally many numbers. `windowed` layers see the last `window` tokens. Scores of
    attention are multiplied by `attention_scale` (None: 1 / sqrt(head_size)), embeddings by `embedding_scale`, what is added to the residual
    stream by `residual_scale`; `logits` is the rule of the head. `padding` is the token whose embedding gets no gradient from lookups in
    transformers. Frequencies are right for rows of at most `longest_row` tokens; None: for all. `prefix` begins the names of the decoder's
    parameters in Hugging Face's model.
    """

    family: Family
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
    activation: str
    biases: Biases
    query_key_norms: Literal["none", "heads", "whole"]
    rotary: tuple[RotaryPositions, ...]
    rotary_of: tuple[int | None, ...]
    windowed: tuple[bool, ...]
    logits: LogitRule
    mixture: Mixture | None
    window: int | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    longest_row: int | None = None
    latent: Latent | None = None
    vision: Vision | None = None

    @property
    def plain_attention(self) -> bool:
        """False if layers attend in a sliding window, with sinks, or with a scale of their own."""
        return self.window is None and self.attention_scale is None and not self.family.sinks

    @property
    def prefix(self) -> str:
        return "model." if self.vision is None else "model.language_model."

    def pad_vocabulary(self, tensor_parallel: int) -> int:
        """Return the vocabulary size rounded up to a multiple of the tensor-parallel ranks."""
        return -(-self.vocabulary // tensor_parallel) * tensor_parallel


def architecture_of(config: Any, name: str, rotary_length: int | None = None) -> Architecture:
    """Return the architecture of a `transformers.PretrainedConfig` that `limits.refuse_model` has accepted.

    Rotary frequencies that depend on lengths are those of rows of `rotary_length` tokens (`model.rotary_length`). Raises ModelError if its
    numbers contradict each other.
    """
    text, family = config.get_text_config(decoder=True), FAMILIES[config.model_type]
    if text.num_attention_heads % text.num_key_value_heads:
        raise ModelError(
            f"{name} has {text.num_attention_heads} attention heads over {text.num_key_value_heads} key and value heads",
            remedy="Correct the model's config.json",
        )
    longest_row = choose_rotary_length(config, rotary_length)
    kinds = rotary_tables(text)
    windowed = windowed_layers(text, family)
    return Architecture(
        family=family,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        key_heads=text.num_key_value_heads,
        head_size=_head_size(text),
        feed_forward=text.intermediate_size,
        vocabulary=text.vocab_size,
        longest=text.max_position_embeddings,
        epsilon=text.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        padding=text.pad_token_id,
        activation=getattr(text, family.activation),
        biases=Biases(*(is_on(text, bias) for bias in (family.query_key_value_bias, family.output_bias, family.feed_forward_bias))),
        query_key_norms=_query_key_norms(text, family),
        rotary=tuple(_rotary_positions(text, kind, longest_row) for kind in kinds),
        rotary_of=_rotary_kinds(text, list(kinds)),
        windowed=windowed,
        window=text.sliding_window if any(windowed) else None,
        logits=LogitRule.of(config),
        attention_scale=_attention_scale(text, family),
        embedding_scale=_embedding_scale(text, family),
        residual_scale=float(text.residual_multiplier) if family.multipliers else 1.0,
        longest_row=longest_row,
        mixture=_mixture(text, family),
        latent=Latent.of(text) if family.latent else None,
        vision=Vision.of(config, name) if config.model_type in VISION_FAMILIES else None,
    )


def _head_size(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _query_key_norms(text: Any, family: Family) -> Literal["none", "heads", "whole"]:
    key = family.query_key_norms_if
    return family.query_key_norms if key is None or getattr(text, key) else "none"


def _attention_scale(text: Any, family: Family) -> float | None:
    if family.multipliers:
        return float(text.attention_multiplier)
    if family.latent:
        return _latent_scale(text)
    # Gemma's, which need not be the size of a head
    size = getattr(text, "query_pre_attn_scalar", None)
    return None if size is None else 1 / math.sqrt(size)


def _latent_scale(text: Any) -> float:
    """Return the factor of scores, with that of YaRN for all numbers of a head (`mscale_all_dim`), as DeepSeek-V3's code has it."""
    table, scale = rotary_tables(text)[""], 1 / math.sqrt(text.qk_nope_head_dim + text.qk_rope_head_dim)
    weight = table.get("mscale_all_dim", 0) if table["rope_type"] != "default" else 0
    return scale * (0.1 * weight * math.log(table["factor"]) + 1.0) ** 2 if weight and table["factor"] > 1 else scale


def _embedding_scale(text: Any, family: Family) -> float:
    if family.scales_embedding:
        return math.sqrt(text.hidden_size)
    return float(text.embedding_multiplier) if family.multipliers else 1.0


def _rotary_kinds(text: Any, kinds: list[str]) -> tuple[int | None, ...]:
    """Return each layer's place in `kinds`; a 0 in `no_rope_layers` says that a layer has no positions."""
    if len(kinds) > 1 or kinds[0]:
        return tuple(kinds.index(kind) for kind in text.layer_types)
    rotated = getattr(text, "no_rope_layers", None) or [1] * text.num_hidden_layers
    return tuple(0 if is_rotated else None for is_rotated in rotated)


def _rotary_positions(text: Any, kind: str, longest_row: int | None) -> RotaryPositions:
    """Return inverse frequencies and scaling as transformers computes them; `kind` is the type of layer, "" for all."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    table = rotary_tables(text)[kind]
    if table["rope_type"] == "default":
        size = int(_head_size(text) * table.get("partial_rotary_factor", 1.0))
        with torch.device("cpu"):
            return RotaryPositions(1.0 / (table["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)))
    layer = {"layer_type": kind} if kind else {}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[table["rope_type"]](text, torch.device("cpu"), seq_len=longest_row, **layer)
    return RotaryPositions(frequencies.detach().float().clone(), float(scaling))


def _mixture(text: Any, family: Family) -> Mixture | None:
    names, layers = family.mixture, layers_with_experts(text, family)
    if names is None or not any(layers):
        return None
    width = getattr(text, names.width)
    shared = 0
    if names.shared is not None:
        shared = getattr(text, names.shared_width) * (1 if names.shared_count is None else getattr(text, names.shared_count))
    return Mixture(
        count=getattr(text, names.count),
        chosen=text.num_experts_per_tok,
        feed_forward=width,
        normalized=is_on(text, names.normalized),
        layers=layers,
        sigmoid=names.scores == "sigmoid",
        corrected=names.corrected,
        groups=text.n_group if names.corrected else 1,
        chosen_groups=text.topk_group if names.corrected else 1,
        factor=float(text.routed_scaling_factor) if names.corrected else 1.0,
        shared=shared,
        shared_gate=names.shared_gate,
        of_chosen=names.scores == "chosen",
        clamped=float(text.swiglu_limit) if names.clamped else None,
        alpha=float(text.swiglu_alpha) if names.clamped else 1.0,
    )
