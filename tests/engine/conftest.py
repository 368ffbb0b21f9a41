"""A tiny model with a tokenizer, for tests that open an engine."""

from pathlib import Path

import pytest

from skyrl_engine.modeling.tiny import write_model, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    write_tokenizer(directory, ["some words to learn from"])
    return directory
