"""A configuration that cannot be used is blamed itself: its file, the place in it, and what to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.facts import ModelFacts

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


def write(folder: Path, content: Any) -> ModelConfig:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text)
    return ModelConfig(str(folder))


@pytest.mark.parametrize(
    ("content", "match", "remedy"),
    [
        ('{"model_type": "llama",\n "hidden_size": }', r"config\.json is not valid JSON: line 2, column 17: Expecting value", "Repair"),
        ('{"model_type": "llama", "hidden', r"config\.json is not valid JSON: line 1, column 25: Unterminated string", "Repair"),
        ("", r"config\.json is empty", "Repair"),
        ("[" * 100_000, r"config\.json is nested too deeply", "Repair"),
        (["llama"], r"config\.json holds a list, where a JSON object", "Repair"),
        ("true", r"config\.json holds a truth value, where a JSON object", "Repair"),
        ("null", r"config\.json holds null, where", "Repair"),
        ({"hidden_size": 16}, r'config\.json names no "model_type"', "add its model_type"),
        (LLAMA | {"model_type": "lama"}, r'config\.json names the model_type "lama", which transformers .* does not know', "'llama'"),
        (LLAMA | {"model_type": "frobnicator"}, r'the model_type "frobnicator", which', "install a version of transformers"),
        (LLAMA | {"model_type": 3}, r"the model_type 3, which", "Correct it"),
        (LLAMA | {"hidden_size": "wide"}, r"config\.json cannot be loaded: .*hidden_size.* expected int, got str", "Repair"),
        (LLAMA | {"num_attention_heads": 3}, r"config\.json cannot be loaded: .* not a multiple of the number of attention", "Repair"),
        (LLAMA | {"num_attention_heads": 0}, r"config\.json cannot be loaded: ", "Repair"),
        (LLAMA | {"num_hidden_layers": -1}, r"has -1 layers, by num_hidden_layers", "Correct that number"),
        ({"model_type": "t5"}, "is a t5 model, which transformers .* has no causal language model for", "causal language model"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}},
            "is computed by Python code of its own, which is not run unless you allow it",
            "model.trust_remote_code = true",
        ),
        (
            {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}},
            "says model_type kimi_k2, which code of the model computes, and transformers .* does not know",
            'Set "model_type": "deepseek_v3" there',
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_used(tmp_path: Path, content: Any, match: str, remedy: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        load_config(write(tmp_path, content))
    assert remedy in caught.value.remedy
    assert str(tmp_path) in caught.value.cause


@pytest.mark.parametrize(
    ("name", "match", "remedy"),
    [
        ("notes.txt", "model.path is the file .*notes.txt, where a model's directory must be", "together with config.json"),
        ("model.gguf", "model.path is the file .*model.gguf, where", "safetensors version"),
        ("nowhere", "there is no model directory .*nowhere", "hub id such as"),
    ],
)
def test_a_path_that_is_no_directory(tmp_path: Path, name: str, match: str, remedy: str) -> None:
    for file in ("notes.txt", "model.gguf"):
        (tmp_path / file).write_text("x")
    with pytest.raises(ModelError, match=match) as caught:
        load_config(ModelConfig(str(tmp_path / name)))
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", 'Write the hub id: "Qwen/Qwen3-0.6B"'),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main?x=1", 'Write the hub id: "Qwen/Qwen3-0.6B"'),
        ("s3://bucket/model", "Download the model and name its directory"),
    ],
)
def test_an_address_of_the_web(path: str, remedy: str) -> None:
    with pytest.raises(ModelError, match=r"is the address .* where a directory or a hub id must be") as caught:
        load_config(ModelConfig(path))
    assert caught.value.remedy == remedy


def test_a_name_that_is_neither_here_nor_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="there is no directory my-model here, and the configuration of my-model cannot") as caught:
        load_config(ModelConfig("my-model"))
    assert "./NAME" in caught.value.remedy
    assert "installation#offline-mode" not in str(caught.value)


def test_text_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelError, match=r"config\.json is no text file: byte 7 is not UTF-8"):
        load_config(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize(("content", "match"), [("{", "is not valid JSON"), ("[1]", "holds a list"), ("", "is empty")])
def test_a_broken_generation_configuration_is_not_taken_for_none(tmp_path: Path, content: str, match: str) -> None:
    """A damaged one would be left out by transformers in silence, and by every export."""
    model = write(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"generation_config\.json {match}"):
        load_config(model)


def test_what_cannot_be_read_gives_no_facts(tmp_path: Path) -> None:
    assert ModelFacts(write(tmp_path, "{")).config is None
