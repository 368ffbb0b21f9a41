"""The families of Hugging Face models that the Megatron backend builds: a table of what sets each apart from Llama. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from attrs import field, frozen

VISION_FAMILIES: Final = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""`model_type` of the vision-language models."""


ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
"""Types of rotary positions that are computed."""


@frozen
class NormNames:
    """Hugging Face's names of a layer's norms: before and after attention, before and after the feed-forward part; None: there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None

    @property
    def after(self) -> bool:
        """True if outputs are normalised before they are added to the residual stream."""
        return self.after_attention is not None


@frozen
class MixtureFamily:
    """The experts of a family: keys of its configuration, and names of its tensors.

    `count` and `width` are the keys of the number of experts and of their columns. A token's weights are the softmax of all experts' logits or
    their sigmoids (`scores`), of which the chosen are scaled to sum to 1 if `normalized` says so. `corrected` routers add a bias to the scores
    to choose by, in groups of experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). `shared` names the feed-forward network of all tokens,
    whose number of columns is `shared_width`, that of an expert times `shared_count`; with `shared_gate` its output is weighted. `router` names
    the router. Experts that are `clamped` are gpt-oss's: with biases, and gates and ups that alternate, as `apply_clamped_gate` has it; then
    the router has a bias too.
    """

    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normalized: bool | str = "norm_topk_prob"
    corrected: bool = False
    shared: str | None = None
    shared_width: str = "moe_intermediate_size"
    shared_count: str | None = None
    shared_gate: bool = False
    router: str = "gate"
    clamped: bool = False


_CORRECTED: Final = MixtureFamily(
    count="n_routed_experts", scores="sigmoid", corrected=True, shared="shared_experts", shared_count="n_shared_experts"
)


@frozen
class Family:
    """One family, as far as its layers are not Llama's; by default they are.

    A bias is True, False, or the key of the configuration that says whether there is one. `query_key_norms` are over a head's numbers, or over
    those of all heads, if there is no key or `query_key_norms_if` is on. `zero_centered` norms multiply by 1 plus their weight.
    `fused_projections` and `fused_gate_up` say that files hold queries, keys and values, or gate and up, as one tensor. `windows` says which
    layers attend in the sliding window, if the configuration has one: none, those that `layer_types` names, or all. `multipliers` says that
    the configuration has factors of embeddings, of attention's scores and of what is added to the residual stream, and `scales_embedding` that
    embeddings are multiplied by the root of their width, rounded to their precision. `compiles` says that a test compares its compiled layers.
    `rope_types` are the types of rotary positions that it may have, and `mixture` describes its experts. `latent` attention is
    DeepSeek's, whose bias is that of `output_bias`, and `sinks` are a score per head that attention gives to no token.
    """

    query_key_value_bias: bool | str = False
    output_bias: bool | str = False
    feed_forward_bias: bool | str = False
    query_key_norms: Literal["none", "heads", "whole"] = "none"
    query_key_norms_if: str | None = None
    norms: NormNames = field(factory=NormNames)
    zero_centered: bool = False
    fused_projections: bool = False
    fused_gate_up: bool = False
    gated: bool = True
    activation: str = "hidden_act"
    interleaved_rotary: bool = False
    windows: Literal["none", "layer_types", "all"] = "none"
    multipliers: bool = False
    scales_embedding: bool = False
    compiles: bool = False
    rope_types: tuple[str, ...] = ROPE_TYPES
    mixture: MixtureFamily | None = None
    latent: bool = False
    sinks: bool = False


_BIASES: Final[dict[str, Any]] = {"query_key_value_bias": "attention_bias", "output_bias": "attention_bias"}
_ROPE_TYPES_OF_IMAGES: Final = ("default", "linear", "llama3")
_ALL_BIASES: Final[dict[str, Any]] = {**_BIASES, "feed_forward_bias": "mlp_bias"}
_AFTER: Final = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(**_ALL_BIASES, compiles=True),
    "arcee": Family(**_ALL_BIASES, gated=False),
    "deepseek_v3": Family(output_bias="attention_bias", mixture=_CORRECTED, latent=True),
    "gemma3_text": Family(
        **_BIASES,
        query_key_norms="heads",
        norms=NormNames("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        zero_centered=True,
        activation="hidden_activation",
        windows="layer_types",
        scales_embedding=True,
    ),
    "glm4": Family(
        query_key_value_bias="attention_bias",
        norms=NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        fused_gate_up=True,
        interleaved_rotary=True,
    ),
    "glm4_moe": Family(
        query_key_value_bias="attention_bias", query_key_norms="heads", query_key_norms_if="use_qk_norm", mixture=_CORRECTED
    ),
    "gpt_oss": Family(
        **_BIASES,
        windows="layer_types",
        mixture=MixtureFamily(
            "num_local_experts", "intermediate_size", scores="chosen", normalized=False, router="router", clamped=True
        ),
        sinks=True,
    ),
    "granite": Family(**_ALL_BIASES, multipliers=True),
    "ministral": Family(windows="layer_types"),
    "mistral": Family(windows="all"),
    "mixtral": Family(windows="all", mixture=MixtureFamily("num_local_experts", "intermediate_size", normalized=True)),
    "olmo2": Family(**_BIASES, query_key_norms="whole", norms=_AFTER),
    "olmo3": Family(**_BIASES, query_key_norms="whole", norms=_AFTER, windows="layer_types"),
    "phi3": Family(fused_projections=True, fused_gate_up=True, windows="all"),
    "qwen2": Family(query_key_value_bias=True, windows="layer_types", compiles=True),
    "qwen2_5_vl": Family(query_key_value_bias=True, rope_types=_ROPE_TYPES_OF_IMAGES),
    "qwen2_moe": Family(
        query_key_value_bias="qkv_bias",
        windows="layer_types",
        mixture=MixtureFamily(shared="shared_expert", shared_width="shared_expert_intermediate_size", shared_gate=True),
    ),
    "qwen3": Family(**_BIASES, query_key_norms="heads", windows="layer_types", compiles=True),
    "qwen3_moe": Family(**_BIASES, query_key_norms="heads", windows="all", mixture=MixtureFamily()),
    "qwen3_vl": Family(**_BIASES, query_key_norms="heads", rope_types=_ROPE_TYPES_OF_IMAGES),
    "qwen3_vl_moe": Family(
        **_BIASES, query_key_norms="heads", rope_types=_ROPE_TYPES_OF_IMAGES, mixture=MixtureFamily(normalized=True)
    ),
    "seed_oss": Family(query_key_value_bias="attention_bias", output_bias="attention_out_bias", feed_forward_bias="mlp_bias"),
    "smollm3": Family(**_ALL_BIASES, windows="layer_types"),
}
"""Every family by its `model_type`; that of Qwen2.5 is "qwen2"."""

ACTIVATIONS: Final = ("silu", "gelu_pytorch_tanh", "relu2")
"""Names of the activations that feed-forward layers have."""


def is_on(config: Any, bias: bool | str) -> bool:
    """Return the value of a switch of the table for a decoder's configuration."""
    return bool(getattr(config, bias, False)) if isinstance(bias, str) else bias


def rotary_tables(config: Any) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of rotary positions by type of layer; by "" if all layers have the same."""
    parameters: Mapping[str, Any] = config.rope_parameters
    nested = {name: table for name, table in parameters.items() if isinstance(table, Mapping)}
    return nested or {"": parameters}


def windowed_layers(config: Any, family: Family) -> tuple[bool, ...]:
    """Return, per layer of a decoder's configuration, whether it attends in the sliding window."""
    layers: int = config.num_hidden_layers
    if family.windows == "none" or getattr(config, "sliding_window", None) is None:
        return (False,) * layers
    return (True,) * layers if family.windows == "all" else tuple(kind == "sliding_attention" for kind in config.layer_types)


def layers_with_experts(config: Any, family: Family) -> tuple[bool, ...]:
    """Return, per layer of a decoder's configuration, whether it has experts in place of one feed-forward network."""
    layers = range(config.num_hidden_layers)
    if family.mixture is None:
        return tuple(False for _ in layers)
    if (first := getattr(config, "first_k_dense_replace", None)) is not None:
        return tuple(layer >= first for layer in layers)
    dense, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def has_plain_attention(config: Any, family: Family) -> bool:
    """Return False if layers attend in a sliding window, have sinks, or scale scores by another factor than 1 / sqrt(head size)."""
    scaled = family.multipliers or family.latent or family.sinks or getattr(config, "query_pre_attn_scalar", None) is not None
    return not scaled and not any(windowed_layers(config, family))


def name_peculiarities(config: Any, family: Family) -> Iterator[str]:
    """Yield the features that a decoder's configuration asks for and the Megatron model would leave out."""
    if (activation := getattr(config, family.activation)) not in ACTIVATIONS:
        yield f"the activation {activation}"
    if getattr(config, "router_jitter_noise", 0.0):
        yield f"router_jitter_noise = {config.router_jitter_noise}"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if other:
        yield f"layers of type {other[0]}"
    if family.windows == "none" and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        yield "layers that attend in a sliding window"
    if getattr(config, "use_bidirectional_attention", False):
        yield "attention in both directions"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        yield "a soft cap on its attention's scores"
    for table in rotary_tables(config).values():
        if (kind := table["rope_type"]) not in family.rope_types:
            yield f"rotary positions of type {kind}"
