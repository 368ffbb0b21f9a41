"""Rotary frequencies that transformers chooses by the longest row of a pass are fixed for the run, or the model is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.modeling.loading import load_scorer, load_skeleton
from skyrl_engine.modeling.segments import Segments
from skyrl_engine.modeling.tiny import VOCABULARY, write_model

THRESHOLD = 16
FACTORS = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": THRESHOLD, **FACTORS},
    "original_max_position_embeddings": THRESHOLD,
    "eos_token_id": None,
}
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "max_position_embeddings": THRESHOLD,
}
FAMILIES = {"phi3": LONGROPE, "llama": DYNAMIC}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("models")
    for family, settings in FAMILIES.items():
        write_model(directory / family, family, **settings)
    return {family: str(directory / family) for family in FAMILIES}


def score_alone_and_together(scorer: Any, short: int, long: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a row of `short` tokens by itself, and padded next to a row of `long` tokens."""
    ids = torch.randint(1, VOCABULARY, (2, long), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, short:] = 0
    positions = torch.arange(short - 1)
    labels = ids[0, 1:short]
    with torch.no_grad():
        alone = scorer({"input_ids": ids[:1, :short], "attention_mask": mask[:1, :short]}, positions, labels)
        beside = scorer({"input_ids": ids, "attention_mask": mask}, positions, labels)
    return alone["logprobs"], beside["logprobs"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_scores_the_same_beside_a_longer_one(models: dict[str, str], family: str) -> None:
    """A short and a long row, on both sides of the threshold: float32 sums in another order leave 1e-5, other frequencies 1e-3 and more."""
    _, scorer = load_scorer(ModelConfig(models[family], rotary_length=40))
    alone, beside = score_alone_and_together(scorer, 10, 40)
    torch.testing.assert_close(alone, beside, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_short_and_long_rows_have_the_models_own_frequencies(models: dict[str, str], family: str) -> None:
    """Without longer rows a run computes what transformers computes, with them what transformers computes for the longest."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(models[family])
    for length, wanted in ((10, None), (10, 10), (40, 40)):
        ids = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            own = plain(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
            _, scorer = load_scorer(ModelConfig(models[family], rotary_length=wanted))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            scored = scorer(inputs, torch.arange(length - 1), ids[0, 1:])["logprobs"]
        torch.testing.assert_close(scored, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_beyond_the_length_are_refused(models: dict[str, str], family: str) -> None:
    _, scorer = load_scorer(ModelConfig(models[family]))
    assert scorer.rotary_length == THRESHOLD
    ids = torch.ones(2, THRESHOLD + 1, dtype=torch.int64)
    mask = torch.ones_like(ids)
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match=r"a row has 17 tokens.*fixed them for rows of at most 16") as caught:
        scorer({"input_ids": ids, "attention_mask": mask}, nothing, nothing)
    assert "model.rotary_length = 17" in caught.value.remedy
    packed = {"input_ids": ids[:1], "position_ids": torch.arange(THRESHOLD + 1)[None]}
    with pytest.raises(UnsupportedError, match="a row has 17 tokens"):
        scorer(packed, nothing, nothing, segments=Segments((THRESHOLD + 1,)))
    mask[:, -1] = 0  # padding counts for nothing
    scorer({"input_ids": ids, "attention_mask": mask}, nothing, nothing)


def test_a_skeleton_is_fixed_like_the_model(models: dict[str, str]) -> None:
    model, scorer = load_scorer(ModelConfig(models["phi3"], rotary_length=40))
    skeleton, empty = load_skeleton(ModelConfig(models["phi3"], rotary_length=40))
    assert scorer.rotary_length == empty.rotary_length == 160
    assert model.model.rotary_emb.rope_type == skeleton.model.rotary_emb.rope_type == "fixed"


def test_models_whose_frequencies_do_not_depend_on_lengths_stay_as_they_are(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    model, scorer = load_scorer(ModelConfig(str(tmp_path), rotary_length=8))
    assert (scorer.rotary_length, model.model.rotary_emb.rope_type) == (None, "default")


def test_a_model_that_chooses_in_code_of_its_own_is_refused_beyond_the_threshold(tmp_path: Path) -> None:
    """Phi-3.5-MoE scales its cosines by the longest position of a pass."""
    scales = {"short_mscale": 1.0, "long_mscale": 1.3}
    write_model(tmp_path, "phimoe", num_local_experts=2, rope_parameters={**LONGROPE["rope_parameters"], **scales})
    load_scorer(ModelConfig(str(tmp_path), rotary_length=THRESHOLD))
    with pytest.raises(ModelError, match=r"PhimoeForCausalLM chooses its rotary positions .* in code of its own"):
        load_scorer(ModelConfig(str(tmp_path), rotary_length=THRESHOLD + 1))
