"""The tiny models that this folder's tests train, and what its ranks import before they start."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks are processes of their own and must import the tests' tasks by name

from megatron_tasks import save_tiny

from skyrl_engine.testing.ranks.world import preload

preload("skyrl_engine_megatron.backend")

FAMILIES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama-untied": ("llama", False, {}),
    "qwen3-tied": ("qwen3", True, {}),
    "qwen2-untied": ("qwen2", False, {}),
    "qwen3-moe": (
        "qwen3_moe",
        False,
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "critic": ("llama", False, {"value_head": True}),
    "critic-tied": ("qwen3", True, {"value_head": True}),
    "llama3-rope": (
        "llama",
        True,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny models by name."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, family, tied=tied, **options) for name, (family, tied, options) in FAMILIES.items()}
