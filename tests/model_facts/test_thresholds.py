"""The lengths at which a model's function changes, as its configuration names them."""

import re
from typing import Any

import pytest
from transformers import AutoConfig

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.thresholds import (
    choose_rotary_length,
    explain_serving,
    find_longest_row,
    find_untested_thresholds,
    refuse_longer_rows,
    rotary_threshold,
    thresholds,
)

ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
PHI = AutoConfig.for_model("phi3", max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters=ROPE)
NTK = AutoConfig.for_model(
    "llama", max_position_embeddings=2048, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
)


def _stretch(kind: str, factor: float, original: int | None = None, **numbers: float) -> Any:
    named = {} if original is None else {"original_max_position_embeddings": original}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": factor, **named, **numbers}
    return AutoConfig.for_model("llama", max_position_embeddings=2048, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PHI, {"rotary positions": 4096}),
        (NTK, {"rotary positions": 2048}),
        (AutoConfig.for_model("llama"), {}),
        (AutoConfig.for_model("mistral", sliding_window=512), {"sliding_window": 512}),
        (AutoConfig.for_model("qwen2", sliding_window=512, use_sliding_window=False), {}),
        (AutoConfig.for_model("gemma3_text", sliding_window=64), {"sliding_window": 64}),
        (AutoConfig.for_model("llama4_text", attention_chunk_size=128), {"attention_chunk_size": 128}),
    ],
)
def test_thresholds(config: Any, expected: dict[str, int]) -> None:
    assert thresholds(config) == expected


@pytest.mark.parametrize(
    ("config", "wanted", "fixed"),
    [
        (PHI, None, 4096), (PHI, 100, 4096), (PHI, 4096, 4096), (PHI, 4097, 131072), (PHI, 200_000, 200_000),
        (NTK, None, 2048), (NTK, 7, 2048), (NTK, 3000, 3000), (AutoConfig.for_model("llama"), 9, None),
    ],
)  # fmt: skip
def test_frequencies_are_fixed_by_the_longest_row(config: Any, wanted: int | None, fixed: int | None) -> None:
    assert choose_rotary_length(config, wanted) == fixed


@pytest.mark.parametrize(
    ("shortest", "longest", "missed"), [(5, 4096, True), (5, 4097, False), (4097, 5000, True), (4096, 5000, False)]
)
def test_rows_must_lie_on_both_sides(shortest: int, longest: int, missed: bool) -> None:
    assert bool(find_untested_thresholds(PHI, shortest, longest)) == missed


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NTK, 4096),
        (PHI, 131072),
        (AutoConfig.for_model("llama", max_position_embeddings=2048), 2048),
        (_stretch("linear", 4.0), 8192),
        (_stretch("yarn", 4.0), 8192),
        (_stretch("yarn", 4.0, 512), 2048),
        (_stretch("yarn", 4.0, 1024), 4096),
        (_stretch("llama3", 8.0, 512, low_freq_factor=1.0, high_freq_factor=4.0), 2048),
    ],
)
def test_positions_that_rotary_positions_stretch(config: Any, expected: int) -> None:
    """Qwen3 names YaRN's factor with the positions before it, DeepSeek with those after it; llama3's are always those after it."""
    assert find_longest_row(config, config.max_position_embeddings) == expected


def test_a_table_per_type_of_layer() -> None:
    config = AutoConfig.for_model("gemma3_text", max_position_embeddings=256)
    config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 8.0}
    assert rotary_threshold(config) == 256


def test_the_refusal_names_both_lengths() -> None:
    refuse_longer_rows("phi", 16, 16)
    with pytest.raises(UnsupportedError, match="a row has 17 tokens, and phi chooses") as caught:
        refuse_longer_rows("phi", 16, 17)
    assert "model.rotary_length = 17" in caught.value.remedy


@pytest.mark.parametrize(
    ("config", "wanted", "words"),
    [
        (PHI, 100, "of rows of 4,096 tokens .* a longest sequence of at most 4,096 tokens"),
        (PHI, 5000, "of rows of 131,072 tokens .* a longest sequence of more than 4,096 tokens"),
        (NTK, None, "vLLM fixes dynamic NTK at 2,048 tokens, as this run"),
        (NTK, 3000, "of rows of 3,000 tokens .* at 2,048 tokens, which are other ones"),
    ],
)
def test_servers_are_told_what_they_must_set(config: Any, wanted: int | None, words: str) -> None:
    note = explain_serving(config, wanted)
    assert note is not None
    assert re.search(words, note), note


def test_servers_of_other_models_are_told_nothing() -> None:
    assert explain_serving(AutoConfig.for_model("llama"), 9) is None
