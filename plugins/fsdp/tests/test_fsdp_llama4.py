"""Llama 4 as a text model: chunked attention, layers without rotary angles, scores scaled by position, a shared expert and a sigmoid router.

Gradients are compared with transformers' own in float64, per parameter, as ||g - g'|| / ||g'||. Its experts are computed for all tokens, as in
transformers' code. Documents are longer than its chunks, and than the positions after which its scores are scaled.
"""

from pathlib import Path

import pytest
from architectures import FAMILIES
from fsdp_resuming import check_resume_and_export
from fsdp_tasks import accumulate_gradients, outcome_with
from transformers import AutoConfig

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.modeling.load_check import check_loading
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.testing.backends.batches import build_padded, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.layer_styles import refuse_model
from skyrl_engine_fsdp.plugin import FsdpConfig

TP = FsdpConfig(tensor_parallel=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama4")
    write_model(folder, "llama4_text", **FAMILIES["llama4_text"])
    make_parts_differ(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "float64"])
def test_gradients_on_two_ranks_are_the_definitions(pair: World, directory: str, dtype: str) -> None:
    config = AutoConfig.from_pretrained(directory)
    longest = max(len(document.ids) for document in documents())
    assert longest > config.attention_chunk_size
    assert longest > config.floor_scale
    assert sorted(config.layer_types) == ["chunked_attention", "full_attention"]
    due = definition(directory, documents())
    for _, gradients in pair.run(accumulate_gradients, directory, build_padded, FsdpConfig(), dtype=dtype):
        assert gradients.keys() == due.gradients.keys()
        assert find_worst_difference(gradients, due.gradients) <= (1e-6 if dtype == "float64" else 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [FsdpConfig(), TP], ids=["dp2", "tp2"])
def test_training_goes_on_exactly_and_the_export_is_whole(pair: World, directory: str, tmp_path: Path, options: FsdpConfig) -> None:
    check_resume_and_export(pair, directory, tmp_path, options)


def test_packed_rows_and_float64_of_divided_heads_are_refused(directory: str) -> None:
    with pytest.raises(
        UnsupportedError, match="cannot be trained on packed rows: its attention mask is neither causal nor a sliding"
    ):
        check_loading(ModelConfig(directory), "packed")
    with pytest.raises(UnsupportedError, match="turns queries and keys in float32"):
        refuse_model(2, AutoConfig.from_pretrained(directory), ModelConfig(directory, dtype="float64"))


@pytest.mark.nightly
def test_context_parallel_ranks_refuse_it(pair: World, directory: str) -> None:
    for outcome in pair.run(outcome_with, directory, FsdpConfig(context_parallel=2)):
        assert "neither causal nor a sliding window" in outcome
