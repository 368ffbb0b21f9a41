"""transformers' tensor-parallel plans: the styles by which they divide the modules of a model. No torch.

The backend fsdp trains models that are divided by them, and generators on tensor-parallel ranks sample from such.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.vision_language import refuse_unequal_parts, takes_images

COLUMNS, ROWS = "colwise", "rowwise"
"""A linear layer divided along its outputs, which stay divided; one divided along its inputs, which come divided."""

GATHERED_COLUMNS, SPLIT_ROWS = "colwise_gather_output", "rowwise_split_input"
"""The same of layers whose outputs and inputs every rank has whole: fused projections as Phi-3's, or norms over all heads as OLMo 2's."""

LOCAL_HEADS = "replicated_with_grad_allreduce"
"""Weights that every rank holds whole and applies to its own heads only, such as Qwen3's norms of queries and keys, whose gradient is the sum
over ranks."""

LATENT: Final = "mla_kv_a_proj"
"""A projection to latent keys and values that every rank holds whole (DeepSeek-V2): its last outputs, the rotary part of keys, go to every
rank's heads as they are."""

EXPERTS: Final = "moe_tp_experts"
"""The experts of a layer. Transformers divides each expert along its columns; here each rank holds some experts whole."""

SINKS: Final = "attention_sinks"
"""A layer of attention with a score for each head beside those of the keys (`sinks`): every rank has those of its own heads."""

EMBEDDING: Final = "embedding_rowwise"
"""An input embedding divided along the vocabulary, as every model's is here."""

LINEAR: Final = frozenset({COLUMNS, ROWS, GATHERED_COLUMNS, SPLIT_ROWS})
"""Styles of linear layers that are divided."""

KNOWN: Final = LINEAR | {LOCAL_HEADS, LATENT, EXPERTS, SINKS, EMBEDDING}
"""Styles that ranks here know."""

EXPERT_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names by which configurations count the experts of a layer."""

_QWEN3: Final[Mapping[str, str]] = {
    **{f"layers.*.self_attn.{name}_proj": COLUMNS for name in "qkv"},
    **{f"layers.*.self_attn.{name}_norm": LOCAL_HEADS for name in "qk"},
    "layers.*.self_attn.o_proj": ROWS,
    "layers.*.mlp.gate_proj": COLUMNS,
    "layers.*.mlp.up_proj": COLUMNS,
    "layers.*.mlp.down_proj": ROWS,
}

PLANS: Final[Mapping[str, Mapping[str, str]]] = {
    "qwen3_vl_text": _QWEN3,
    "gpt_oss": {
        **{
            pattern: style
            for pattern, style in _QWEN3.items()
            if pattern.endswith(("self_attn.q_proj", "k_proj", "v_proj", "o_proj"))
        },
        "layers.*.self_attn": SINKS,
        "layers.*.mlp.experts": EXPERTS,
    },
}
"""Plans of decoders, by their `model_type`, of which transformers' own divides the embedding alone. Qwen3-VL's layers are Qwen3's."""

LACKING: Final[Mapping[str, Mapping[str, str]]] = {
    "qwen3_vl_moe_text": {f"layers.*.self_attn.{name}_norm": LOCAL_HEADS for name in "qk"}
}
"""Styles that transformers' plans of decoders leave out, by their `model_type`; the plan of Qwen3-MoE, whose layers these are, has them."""

DIVIDED_SIZES: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes of a decoder that the number of tensor-parallel ranks must divide."""


def styles_of(config: Any) -> Mapping[str, str]:
    """Return the plan of a `transformers.PretrainedConfig`: a style by module pattern such as "layers.*.mlp.up_proj"; empty without a plan.

    The weights of experts, which a plan names too, are left out: `EXPERTS` says all about them. Families of `PLANS` have a plan of ours.
    """
    text = config.get_text_config(decoder=True)
    styles: dict[str, str] = dict(getattr(text, "base_model_tp_plan", None) or {})
    if set(styles.values()) <= {EMBEDDING}:
        styles |= PLANS.get(text.model_type, {})
    styles |= LACKING.get(getattr(text, "model_type", ""), {})
    return {pattern: style for pattern, style in styles.items() if styles.get(pattern.rpartition(".")[0]) != EXPERTS}


def list_divided_patterns(config: Any) -> tuple[str, ...]:
    """Return `fnmatch` patterns for the names of parameters of layers that a plan divides; of adapters, the matrix on the divided side."""
    names = []
    for pattern, style in styles_of(config).items():
        if style == SINKS:
            names.append(f"*.{pattern}.sinks")
        elif style == EXPERTS:
            names.append(f"*.{pattern}.*")
        elif style in LINEAR:
            parts = ("weight", "bias") if style in (COLUMNS, GATHERED_COLUMNS) else ("weight",)
            names += [f"*.{pattern}.{base}{part}" for part in parts for base in ("", "base_layer.")]
            names.append(f"*.{pattern}.{'lora_B' if 'bias' in parts else 'lora_A'}.*")
        if style == COLUMNS:
            names.append(f"*.{pattern}.lora_magnitude_vector.*")
    return tuple(names)


def match_styles(styles: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the style of every module of these names that one of the patterns of `styles` names, in the order of the names."""
    patterns = {re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style for pattern, style in styles.items()}
    found: dict[str, str] = {}
    for name in names:
        style = next((style for pattern, style in patterns.items() if pattern.fullmatch(name)), None)
        if style is not None:
            found[name] = style
    return found


def find_plan_problem(config: Any, name: str) -> str | None:
    """Say, as a clause, why the model `name` cannot be divided by transformers' plan; None where it can, as far as the plan tells."""
    styles, family = styles_of(config), config.get_text_config(decoder=True).model_type
    if not styles:
        return f"transformers has no tensor-parallel plan for {family} models such as {name}"
    unknown = sorted((style, pattern) for pattern, style in styles.items() if style not in KNOWN)
    if unknown:
        style, pattern = unknown[0]
        return f"{family} models such as {name} divide {pattern} by {style!r}, which is not known here"
    if set(styles.values()) == {EMBEDDING}:
        return f"transformers' tensor-parallel plan for {family} models such as {name} divides the embedding alone"
    return None


def refuse_unequal_sizes(config: Any, name: str, *, ranks: int, options: str) -> None:
    """Raise UnsupportedError where `ranks`, which `options` set, does not divide a size of the model `name` that its plan divides."""
    for attribute in (*DIVIDED_SIZES, *(EXPERT_COUNTS if EXPERTS in styles_of(config).values() else ())):
        refuse_unequal_parts(config, name, attribute, parts=ranks, options=options)


def divides_keys(config: Any) -> bool:
    """Say whether each rank has the keys and values of its own heads alone."""
    return any(pattern.endswith(("k_proj", "kv_b_proj")) and style == COLUMNS for pattern, style in styles_of(config).items())


def refuse_indivisible(config: Any, name: str, ranks: int) -> None:
    """Raise UnsupportedError for a model that so many ranks cannot divide among themselves to sample from it."""
    problem = find_plan_problem(config, name)
    if takes_images(config):
        problem = f"no test shows that they sample what one rank with all of {name}, a model with a vision tower, does"
    if problem is not None:
        raise UnsupportedError(
            f"{ranks} tensor-parallel ranks are to sample together, and {problem}",
            remedy="Sample with the generator vllm, or on one tensor-parallel rank",
        )
    refuse_unequal_sizes(config, name, ranks=ranks, options="the number of tensor-parallel ranks")
