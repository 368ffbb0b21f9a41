"""Every end token that a model names counts, wherever it names it."""

import json
from pathlib import Path

import pytest

from skyrl_engine import ModelError
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.model_facts.end_tokens import end_tokens
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.modeling.tiny import write_model, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, eos_token_id=9)
    write_tokenizer(directory, ["a few words"])
    return directory


def test_all_of_them_once(folder: Path) -> None:
    model = ModelConfig(str(folder))
    tokenizer = load_tokenizer(model)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 9, 30]}))
    assert end_tokens(model) == (11, 9, 30)
    assert end_tokens(model, tokenizer) == (11, 9, 30, tokenizer.eos_token_id)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert end_tokens(model) == (4, 9)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7}))
    assert end_tokens(model) == (9,)
    (folder / "generation_config.json").unlink()
    assert end_tokens(model) == (9,)


def test_a_damaged_generation_configuration_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        end_tokens(ModelConfig(str(folder)))
    (folder / "generation_config.json").unlink()
