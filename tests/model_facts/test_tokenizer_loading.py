"""Loading tokenizers from directories; every mistake names its key and what to do."""

import logging

import pytest

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.errors import ModelError
from skyrl_engine.model_facts.tokenizer import load_tokenizer
from skyrl_engine.modeling.tiny import END, write_tokenizer


@pytest.fixture
def tokenizer_folder(tmp_path):
    folder = tmp_path / "model"
    write_tokenizer(folder, ["one text"], template="<|im_start|>{{ messages[0].content }}", padding=None)
    return folder


def test_a_local_directory_without_a_padding_token(tokenizer_folder, caplog, monkeypatch):
    monkeypatch.setattr("socket.socket", None)
    with caplog.at_level(logging.INFO, logger="skyrl_engine"):
        tokenizer = load_tokenizer(ModelConfig(path=str(tokenizer_folder)))
    assert tokenizer.pad_token == tokenizer.eos_token == END
    assert "has no padding token" in caplog.text
    assert "im_start" in tokenizer.chat_template


def test_the_tokenizer_s_own_location_and_a_template_file(tokenizer_folder, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    model = ModelConfig(path="somewhere/else", tokenizer=str(tokenizer_folder), chat_template=str(tmp_path / "chat.jinja"))
    assert load_tokenizer(model).chat_template == "{{ messages[0].content }}"


def test_locations_that_hold_no_tokenizer(tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"model.path names the directory .*gone, which does not exist"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "gone")))
    with pytest.raises(ModelError, match=r"model.tokenizer is the file .*, where the tokenizer must be a directory"):
        load_tokenizer(ModelConfig(path=str(tokenizer_folder), tokenizer=str(tokenizer_folder / "tokenizer.json")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no tokenizer can be loaded from .*empty\. Check that .* holds tokenizer.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "empty")))
    with pytest.raises(ModelError, match=r"no tokenizer can be loaded from nobody/nothing\. Set model.path to a local directory"):
        load_tokenizer(ModelConfig(path="nobody/nothing"))
    with pytest.raises(ModelError, match=r"model.chat_template names the file .*, which cannot be read"):
        load_tokenizer(ModelConfig(path=str(tokenizer_folder), chat_template=str(tmp_path / "gone.jinja")))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ('{"a":\n 1,}', r"is not valid JSON: line 2, column 4: "),
        ("[]", "holds a list, where a JSON object"),
        ("", "is empty"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is a Git LFS pointer"),
    ],
)
def test_a_broken_file_is_blamed_itself_with_the_place(tokenizer_folder, name, content, cause):
    (tokenizer_folder / name).write_text(content)
    with pytest.raises(ModelError, match=rf"/{name} {cause}") as caught:
        load_tokenizer(ModelConfig(path=str(tokenizer_folder)))
    assert caught.value.remedy


def test_a_broken_configuration_of_the_model_is_not_blamed_on_the_tokenizer(tokenizer_folder):
    (tokenizer_folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"/config\.json is not valid JSON: line 1, column 2"):
        load_tokenizer(ModelConfig(path=str(tokenizer_folder)))


def test_a_model_without_a_tokenizer_gets_no_empty_one(tmp_path):
    """Transformers makes a tokenizer without words from the architecture, and every sample would be without a token."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match=r"holds no tokenizer: none of .*tokenizer\.json.* is there") as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert "model.tokenizer" in caught.value.remedy
