"""Architectures that the engine is tried with: model types of transformers, and settings that make tiny models of them."""

from typing import Any, Final

from sampled_models import ARCHITECTURES, LATENT, MOE

MAMBA: Final = {"mamba_d_state": 4}
ABSOLUTE: Final = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 160}
ROTATED: Final = {**ABSOLUTE, "rotary_dim": 12}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "codegen": ROTATED,
    "cohere": {},
    "cohere2": {"sliding_window": 7},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "diffllama": {},
    "ernie4_5": {},
    "ernie4_5_moe": MOE,
    "exaone4": {"sliding_window": 7},
    "falcon_mamba": {},
    "flex_olmo": MOE,
    "gemma": {},
    "gemma2": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 9},
    "glm": {},
    "glm4": {},
    "glm4_moe": MOE,
    "gpt2": ABSOLUTE,
    "gpt_bigcode": ABSOLUTE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "gpt_neox": {},
    "gptj": ROTATED,
    "gpt_oss": {**MOE, "sliding_window": 7},
    "granite": {},
    "granitemoe": MOE,
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": MOE,
    "jamba": MAMBA,
    "jetmoe": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "mamba": {},
    "ministral": {"sliding_window": 7},
    "minimax": MOE,
    "mistral": {"sliding_window": 7},
    "mixtral": MOE,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 7},
    "olmoe": MOE,
    "opt": {"ffn_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": MOE,
    "qwen2": {},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": MOE,
    "qwen3_next": ARCHITECTURES["qwen3_next"],
    "recurrent_gemma": {},
    "rwkv": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "starcoder2": {"sliding_window": 7},
    "xglm": {},
}
"""Model types of transformers and settings that make them small. Windows are shorter than the prefixes that samples share."""

VISION: Final = ("qwen3_vl",)
"""Architectures that take images, of which `skyrl_engine.modeling.tiny.write_vision_model` makes a model."""
