"""Texts of a run's tokens: what reads `tokenizer.json` alone says what transformers says."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from skyrl_engine.rollout.texts import decoder_of
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.testing.templates import TEMPLATES


@pytest.mark.parametrize("name", ["chatml"])
def test_token_ids_become_the_texts_of_transformers(tmp_path, name, monkeypatch):
    (tmp_path / "model").mkdir()
    TEMPLATES[name].tokenizer().save_pretrained(tmp_path / "model")
    whole = AutoTokenizer.from_pretrained(tmp_path / "model")
    monkeypatch.setattr("skyrl_engine.rollout.texts.load_tokenizer", None)  # it is not needed
    decode, why = decoder_of(RunDirectory(tmp_path))
    assert why == ""
    draw = np.random.default_rng(0)
    for length in (0, 1, 7, 40):
        token_ids = draw.integers(0, len(whole), length).tolist()
        assert decode(token_ids) == whole.decode(token_ids, skip_special_tokens=False)
