"""Architectures beside rows of shared prefixes: their loss and gradient are those of padded rows, or planning refuses them with a sentence."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from sampled_models import LATENT, MOE
from shared_rows import losses_and_gradients, make_columns

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.load_check import check_loading
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_collators.tree.collator import TreeCollator

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
    "recurrent_gemma": {},
    "rwkv": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "starcoder2": {"sliding_window": 7},
    "xglm": {},
}
"""Model types of transformers and settings that make them small. Windows are shorter than the prefixes that samples share."""

REFUSED: Final = frozenset(
    (
        "biogpt",
        "bloom",
        "diffllama",
        "falcon_mamba",
        "gemma2",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_oss",
        "jamba",
        "lfm2",
        "mamba",
        "minimax",
        "nemotron",
        "opt",
        "recurrent_gemma",
        "rwkv",
        "seed_oss",
        "stablelm",
        "xglm",
    )
)
"""Those that planning refuses: they drop numbers at random, keep a state, or attend in code of their own."""

TOLERANCE: Final = 1e-5
"""Relative to the largest entry, float32; router losses are not part of it."""


def test_of_forty_architectures_and_more_prefixes_are_shared() -> None:
    assert len(FAMILIES.keys() - REFUSED) >= 40
    assert FAMILIES.keys() >= REFUSED


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_shares_prefixes_or_is_refused(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, family, **FAMILIES[family])
    make_parts_differ(tmp_path)
    spec = ModelConfig(str(tmp_path))
    if family in REFUSED:
        with pytest.raises(UnsupportedError) as caught:
            check_loading(spec, "tree")
        assert caught.value.remedy
        return
    check_loading(spec, "tree")
    _, scorer = load_scorer(spec)
    scorer.refuse_rows_unless_supported("tree")
    scorer.eval()
    columns = make_columns(3, depth=3)
    due, expected = losses_and_gradients(scorer, columns, PaddedCollator(), Layout())
    got, gradients = losses_and_gradients(scorer, columns, TreeCollator(), Layout(micro_batch_tokens=120))
    for sample, values in due.items():
        torch.testing.assert_close(got[sample], values, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == expected.keys()
    least = 1e-2 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        apart = float((gradients[name] - gradient).abs().max())
        assert apart <= TOLERANCE * max(float(gradient.abs().max()), least), (name, apart)
