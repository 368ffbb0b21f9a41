"""Tiny models of every family that the backend builds, with the features that set it apart; a task of ranks with rows of trees."""

from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from megatron_tasks import VOCABULARY, arrays, save_tiny

from skyrl_engine.contracts import AdamWSettings, ModelConfig, RankEnvironment
from skyrl_engine.testing.backends.batches import Arrays, WeightedObjective, branching_documents, build_trees
from skyrl_engine_megatron.backend import MegatronBackend
from skyrl_engine_megatron.plugin import MegatronConfig

YARN: Final = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE: Final = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
}
PLAIN: Final = {"rope_type": "default", "rope_theta": 10000.0}
WHOLE_HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads that fill the hidden states, in families whose configuration names no size of a head."""

WINDOW: Final = {"sliding_window": 3}
"""Shorter than the documents."""

FAMILIES: Final[dict[str, tuple[str, bool, dict[str, Any]]]] = {
    "llama-biases": ("llama", False, {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", False, {"sliding_window": None}),
    "mistral-window": ("mistral", True, WINDOW),
    "ministral": ("ministral", False, {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "qwen2-window": ("qwen2", True, {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-yarn": ("qwen3", False, {"rope_parameters": YARN}),
    "seed-oss": (
        "seed_oss",
        False,
        {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "phi3": ("phi3", False, {"rope_parameters": PLAIN, **WHOLE_HEADS}),
    "phi3-longrope": ("phi3", True, {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE, **WHOLE_HEADS, **WINDOW}),
    "granite": (
        "granite",
        True,
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "smollm3": ("smollm3", True, {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, **WINDOW}),
    "arcee": ("arcee", False, {"mlp_bias": True}),
    "olmo2": ("olmo2", False, {}),
    "olmo3": ("olmo3", True, {**WINDOW, "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}}),
    "gemma3": (
        "gemma3_text",
        True,
        {
            **WINDOW,
            "query_pre_attn_scalar": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": PLAIN,
            },
        },
    ),
    "glm4": (
        "glm4",
        False,
        {"attention_bias": True, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    ),
}
"""Family, whether embedding and head are tied, and settings, by name."""

EXPERTS: Final = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CORRECTED: Final = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT: Final = {
    **CORRECTED,
    "num_key_value_heads": 8,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
MIXTURES: Final[dict[str, tuple[str, bool, dict[str, Any]]]] = {
    "mixtral": ("mixtral", False, {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, **WINDOW}),
    "qwen2-moe": (
        "qwen2_moe",
        True,
        {**EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen3-moe-mixed": ("qwen3_moe", False, {**EXPERTS, "num_experts": 4, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "glm4-moe": (
        "glm4_moe",
        False,
        {
            **CORRECTED,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        False,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "swiglu_limit": 0.5,
            "rope_parameters": {**YARN, "truncate": False},
            **WINDOW,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        False,
        {
            **LATENT,
            "q_lora_rank": 12,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    # one group of many experts, and YaRN whose two bounds are the same
    "kimi-k2": (
        "deepseek_v3",
        False,
        {
            **LATENT,
            "n_routed_experts": 24,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "q_lora_rank": 12,
            "rope_parameters": {
                **YARN,
                "rope_theta": 50000.0,
                "factor": 32.0,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "deepseek-v3-plain": ("deepseek_v3", True, {**LATENT, "q_lora_rank": None, "rope_interleave": False, "rope_parameters": PLAIN}),
}
"""Families with experts, with layers without experts among theirs."""

ODD: Final[dict[str, tuple[str, bool, dict[str, Any]]]] = {
    "five-layers": ("qwen3", True, {"num_hidden_layers": 5}),
    "one-key-head": ("qwen3", False, {"num_key_value_heads": 1}),
    "two-key-heads": ("qwen2", False, {"num_key_value_heads": 2}),
    "one-fused-key-head": ("phi3", False, {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_parameters": PLAIN}),
}
"""Models that ranks cannot divide evenly."""


def learn_trees(directory: str, options: MegatronConfig) -> Arrays:
    """The gradient of documents that begin alike, computed in rows of trees."""
    backend = MegatronBackend(options)
    environment = RankEnvironment(dist.get_rank(), dist.get_world_size(), "cpu", 0, "tree")
    backend.setup(ModelConfig(directory, logits_per_chunk=5 * VOCABULARY), AdamWSettings(), environment)
    with closing(backend):
        backend.forward_backward(build_trees(branching_documents(VOCABULARY), 1), WeightedObjective())
        return arrays(backend.gradients())


def save_families(root: Path) -> dict[str, str]:
    """Write them all and return their directories by name."""
    return {
        name: save_tiny(root / name, family, tied=tied, **options)
        for name, (family, tied, options) in {**FAMILIES, **ODD, **MIXTURES}.items()
    }
