"""`model.dropout = "off"` switches off every share that a configuration states, in every part of it, and exports state them again."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.model_facts.dropout import restore_shares
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.modeling.dropout import drops_at_random
from skyrl_engine.modeling.loading import load_scorer, load_skeleton
from skyrl_engine.modeling.tiny import write_model, write_vision_model

GPT2 = {"attn_pdrop": 0.1, "embd_pdrop": 0.2, "resid_pdrop": 0.3}


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gpt2", GPT2), ("qwen3", {"attention_dropout": 0.2}), ("gpt_neox", {"hidden_dropout": 0.4, "attention_dropout": 0.1})],
)
def test_a_loaded_model_drops_nothing(tmp_path: Path, family: str, settings: dict[str, float]) -> None:
    """GPT-2 and GPT-NeoX have modules, Qwen3 an attribute."""
    write_model(tmp_path, family, **settings)
    model, _ = load_scorer(ModelConfig(str(tmp_path)))
    assert drops_at_random(model)
    off = ModelConfig(str(tmp_path), dropout="off")
    for model, _ in (load_scorer(off), load_skeleton(off)):
        assert not drops_at_random(model)
        assert {getattr(model.config, key) for key in settings} == {0.0}
    facts = ModelFacts(off)
    assert facts.dropouts == {}
    assert not facts.draws_masks
    assert facts.switched_off == {(): settings}
    assert ModelFacts(ModelConfig(str(tmp_path))).switched_off == {}


def test_dropout_in_the_code_alone_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    write_model(tmp_path)
    original = Qwen3MLP.__init__

    def with_dropout(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.act_fn = nn.Sequential(self.act_fn, nn.Dropout(0.5))

    monkeypatch.setattr(Qwen3MLP, "__init__", with_dropout)
    assert drops_at_random(load_scorer(ModelConfig(str(tmp_path)))[0])
    assert not drops_at_random(load_scorer(ModelConfig(str(tmp_path), dropout="off"))[0])


def test_parts_of_a_configuration_are_switched_off_too(tmp_path: Path) -> None:
    write_vision_model(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"attention_dropout": 0.0', '"attention_dropout": 0.25'))
    facts = ModelFacts(ModelConfig(str(tmp_path), dropout="off"))
    assert facts.switched_off == {("text_config",): {"attention_dropout": 0.25}}
    assert facts.config is not None
    assert facts.config.text_config.attention_dropout == 0.0
    written = {"text_config": {"attention_dropout": 0.0, "hidden_size": 8}}
    restore_shares(written, facts.switched_off)
    assert written == {"text_config": {"attention_dropout": 0.25, "hidden_size": 8}}
    of_a_part = {"attention_dropout": 0.0}
    restore_shares(of_a_part, facts.switched_off)
    assert of_a_part == {"attention_dropout": 0.0}


def test_dropout_of_adapters_is_not_switched_off_in_silence() -> None:
    with pytest.raises(ValueError, match=r'has dropout 0.1, and model.dropout is "off"'):
        ModelConfig("m", dropout="off", lora=LoraConfig(dropout=0.1))
