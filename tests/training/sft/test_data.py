"""The model's own limit on a sample's length, which a preview and a run share."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen3Config

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import DataConfig, ModelConfig
from skyrl_engine.errors import DataError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.modeling.tiny import write_tokenizer
from skyrl_engine.training.sft.checks import limit_to_model
from skyrl_engine.training.sft.trainer import plan_sft


@pytest.fixture
def model(tmp_path: Path) -> ModelFacts:
    Qwen3Config(max_position_embeddings=48).save_pretrained(tmp_path)
    return ModelFacts(ModelConfig(path=str(tmp_path)))


def test_the_model_limits_what_the_configuration_does_not(model: ModelFacts) -> None:
    assert limit_to_model(DataConfig(train="data"), model).max_length == 48


def test_a_configured_limit_stands(model: ModelFacts) -> None:
    assert limit_to_model(DataConfig(train="data", max_length=8), model).max_length == 8


def test_a_model_that_cannot_be_read_sets_no_limit(tmp_path: Path) -> None:
    assert limit_to_model(DataConfig(train="data"), ModelFacts(ModelConfig(path=str(tmp_path / "missing")))).max_length is None


def test_a_limit_beyond_the_model_s_positions_is_refused_with_the_numbers(model: ModelFacts) -> None:
    assert limit_to_model(DataConfig(train="data", max_length=48), model).max_length == 48
    with pytest.raises(
        DataError, match=r"data\.max_length is 49, and the model has 48 positions .* Set data\.max_length to 48 or less"
    ):
        limit_to_model(DataConfig(train="data", max_length=49), model)


def test_token_ids_beyond_the_vocabulary_are_refused_while_planning(
    tmp_path: Path, configure: Callable[..., ResolvedConfig]
) -> None:
    """A tokenizer of another model: the first step would fail, or a lucky one would train the wrong words."""
    texts = ["".join(map(chr, range(200, 400))), "äöüß"]
    write_tokenizer(tmp_path / "other", [*texts, *(f"{a} + {b} = {a + b}" for a in range(60) for b in range(60))])
    resolved = configure(model={"tokenizer": str(tmp_path / "other")})
    words = r"sample \d+ \(.*\.jsonl line \d+\) holds the token id \d+ at token \d+, and the vocabulary of .* has \d+ tokens"
    with pytest.raises(DataError, match=words) as caught:
        plan_sft(resolved)
    assert "model.tokenizer" in caught.value.remedy
