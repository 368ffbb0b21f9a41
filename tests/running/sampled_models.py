"""Tiny models of the architectures that the generator `hf` is tried with."""

from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from skyrl_engine.modeling.tiny import make_parts_differ, write_model

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
ARCHITECTURES = {
    "qwen3": {},
    "llama": {},
    "gemma3_text": {"sliding_window": 6, "num_hidden_layers": 7},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3_moe": MOE,
    "mixtral": MOE,
    "phi3": {"sliding_window": 2047},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 160},
    "gemma2": {"sliding_window": 6},
    "gpt_oss": {**MOE, "sliding_window": 6},
    "deepseek_v3": LATENT,
    "mamba": {"hidden_size": 32},
    "qwen3_next": {
        **MOE,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
QUICK = {"qwen3", "llama", "gemma3_text"}
READ_ANEW = {"mamba", "qwen3_next", *(["gemma2"] if Gemma2PreTrainedModel._supports_sdpa else [])}
"""Architectures that keep more than keys and values; and Gemma 2 in old releases of transformers, to whose masks cached rows do not fit."""


def write(directory, family, **settings):
    write_model(directory, family, **settings)
    make_parts_differ(directory)
    return directory
