"""The tiny models that this folder's tests train, and what its ranks import before they start."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks are processes of their own and must import the tests' tasks by name

from fsdp_rows import add_head, save_tiny

from skyrl_engine.testing.ranks.world import preload

preload("skyrl_engine_fsdp.backend")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny models by "family-tied" or "family-untied"; "dropout" draws random numbers in training."""
    root = tmp_path_factory.mktemp("models")
    made = {
        f"{family}-{word}": save_tiny(root / f"{family}-{word}", family, tied=word == "tied")
        for family in ("qwen3", "llama")
        for word in ("tied", "untied")
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    others: dict[str, dict[str, Any]] = {
        "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "mistral": {"sliding_window": 4},
        "stablelm": {},
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "gemma2": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 1.0},
        "cohere": {"logit_scale": 0.25},
        "qwen3_moe": moe,
        # residuals or buffers in float32
        "mamba": {},
        "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1, "state_size": 8, "chunk_size": 4},
        "minimax": {"num_local_experts": 2},
    }
    for family, options in others.items():
        made[family] = save_tiny(root / family, family, tied=family != "qwen3_moe", **options)
    made["critic"] = add_head(made["llama-untied"], root / "critic")
    made["critic-tied"] = add_head(made["qwen3-tied"], root / "critic-tied")
    return {**made, "dropout": save_tiny(root / "dropout", "qwen3", tied=True, attention_dropout=0.2)}
