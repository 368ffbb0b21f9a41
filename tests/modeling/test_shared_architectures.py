"""Architectures beside rows of shared prefixes: their loss and gradient are those of padded rows, or planning refuses them with a sentence."""

from pathlib import Path
from typing import Final

import pytest
import torch
from architectures import FAMILIES
from shared_rows import losses_and_gradients, make_columns

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.modeling.load_check import check_loading
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_collators.tree.collator import TreeCollator

REFUSED: Final = frozenset(
    (
        "biogpt",
        "bloom",
        "diffllama",
        "falcon_mamba",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "jamba",
        "lfm2",
        "llama4_text",
        "mamba",
        "minimax",
        "nemotron",
        "opt",
        "qwen3_next",
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
