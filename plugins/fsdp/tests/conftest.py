"""The tiny models that this folder's tests train, and what its ranks import before they start."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks are processes of their own and must import the tests' tasks by name


from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.ranks.world import preload

preload("skyrl_engine_fsdp.backend")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny models by "family-tied" or "family-untied"; "dropout" draws random numbers in training."""
    root = tmp_path_factory.mktemp("models")
    settings: dict[str, dict[str, Any]] = {
        "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "mistral": {"sliding_window": 4},
        "stablelm": {"hidden_size": 64},
        "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "gemma2": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 1.0},
        "cohere": {"logit_scale": 0.25},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        # residuals or buffers in float32
        "mamba": {},
        "mamba2": {"num_heads": 8, "expand": 2, "n_groups": 1, "state_size": 8, "chunk_size": 4},
        "minimax": {"num_local_experts": 2},
    }
    for family, options in settings.items():
        write_model(root / family, family, tie_word_embeddings=family != "qwen3_moe", **options)
    for family in ("qwen3", "llama"):
        for word in ("tied", "untied"):
            write_model(root / f"{family}-{word}", family, tie_word_embeddings=word == "tied")
    write_model(root / "critic", "llama", value_head=True)
    write_model(root / "critic-tied", value_head=True)
    write_model(root / "dropout", attention_dropout=0.2)
    # rows of whole blocks, some of them fewer than make moments of 8 bits, and no number of rows that two ranks halve
    write_model(root / "wide", hidden_size=256, intermediate_size=27, attention_dropout=0.2)
    return {directory.name: str(directory) for directory in root.iterdir()}
