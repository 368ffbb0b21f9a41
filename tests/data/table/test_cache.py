"""The token cache: what makes a new entry, what survives, and what happens to damage and to a full disk."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import load_columns
from skyrl_engine.data.table.cache import PACKAGE, TokenCache, code_identity
from skyrl_engine.errors import DataError

ROWS = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "answer"}]} for i in range(20)]


@pytest.fixture
def load_cached(tmp_path, make_tokenizer):
    """Load with settings; the file is written once."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")

    def load(tokenizer=None, **settings):
        data = DataConfig(**{"train": str(path), "cache": str(tmp_path / "cache"), **settings})
        return load_columns(data, tokenizer or make_tokenizer(), split="train")

    load.path = path
    return load


def test_the_second_load_comes_from_the_cache_and_is_the_same(load_cached):
    first, second = load_cached(), load_cached()
    assert (first.counts.from_cache, second.counts.from_cache) == (False, True)
    assert second.counts.loss_tokens == first.counts.loss_tokens
    assert second.format == first.format
    for name in ("input_ids", "token_offsets", "action_offsets", "loss_weight"):
        np.testing.assert_array_equal(getattr(first.columns, name), getattr(second.columns, name))


def test_a_copy_of_the_data_elsewhere_is_the_same_content(load_cached, tmp_path):
    load_cached()
    (tmp_path / "copy.jsonl").write_bytes(load_cached.path.read_bytes())
    assert load_cached(train=str(tmp_path / "copy.jsonl")).counts.from_cache


def test_a_call_that_padded_or_cut_does_not_change_the_tokenizer_s_identity(load_cached, make_tokenizer):
    tokenizer = make_tokenizer()
    load_cached(tokenizer)
    tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)
    assert load_cached(tokenizer).counts.from_cache


@pytest.mark.parametrize(
    "change",
    ["content", "template", "vocabulary", "eos", "loss_on", "max_length", "overlong", "max_samples"],
)
def test_whatever_the_tokens_depend_on_makes_a_new_entry(load_cached, make_tokenizer, change):
    tokenizer, settings = make_tokenizer(), {"max_length": 200}
    load_cached(tokenizer, **settings)
    if change == "content":
        load_cached.path.write_text(load_cached.path.read_text(encoding="utf-8").replace("q0", "r0"), encoding="utf-8")
    elif change == "template":
        tokenizer.chat_template += " "
    elif change == "vocabulary":
        tokenizer.add_tokens(["answer"])
    elif change == "eos":
        tokenizer.eos_token = "<|eot|>"
    else:
        settings |= {"loss_on": {"loss_on": "all"}, "max_length": {"max_length": 201}}.get(change, {})
        settings |= {"overlong": {"overlong": "drop"}, "max_samples": {"max_samples": 19}}.get(change, {})
    assert not load_cached(tokenizer, **settings).counts.from_cache


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "other"])
def test_a_damaged_file_is_made_again(load_cached, damage):
    dataset = load_cached()
    expected, path = dataset.columns.input_ids.copy(), dataset.cache_file
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        place = content.find(expected[:8].tobytes())
        assert place > 0
        content[place] ^= 1
    new = {"cut": content[:-100], "flipped": content, "emptied": b"", "other": b"ARROW1" + bytes(300)}[damage]
    del dataset
    path.unlink()
    path.write_bytes(new)
    again = load_cached()
    assert not again.counts.from_cache
    np.testing.assert_array_equal(again.columns.input_ids, expected)
    assert load_cached().counts.from_cache


def test_a_failing_sample_leaves_nothing_behind(load_cached, tmp_path):
    with load_cached.path.open("a", encoding="utf-8") as file:
        file.write("not json\n")
    with pytest.raises(DataError, match="line 21 is not valid JSON"):
        load_cached()
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_behind(load_cached, tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written: No space left on device\. Free space there"):
        load_cached()
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_directory_that_cannot_be_made(load_cached, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        load_cached(cache=str(tmp_path / "file"))


def test_what_killed_processes_left_behind_is_removed(load_cached, tmp_path):
    folder = tmp_path / "cache" / "tokens"
    folder.mkdir(parents=True)
    old, new = folder / "old.partial", folder / "new.partial"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    load_cached()
    assert (old.exists(), new.exists()) == (False, True)


def test_the_directory_is_the_configured_one_or_the_environment_s_or_the_user_s(monkeypatch):
    monkeypatch.setenv("SKYRL_ENGINE_CACHE", "/somewhere")
    assert TokenCache.of("/configured").directory == Path("/configured/tokens")
    assert TokenCache.of(None).directory == Path("/somewhere/tokens")
    monkeypatch.delenv("SKYRL_ENGINE_CACHE")
    assert TokenCache.of(None).directory.parent.name == "skyrl-engine"


@pytest.mark.parametrize("file", ["text/chat.py", "images/files.py", "sources/rows.py", "table/filling.py", "dataset.py"])
def test_a_change_of_any_file_that_makes_tokens_makes_another_key(tmp_path, file):
    package = tmp_path / "data"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_identity(package)
    assert before == code_identity()
    with (package / file).open("a") as changed:
        changed.write("# another rendering\n")
    assert code_identity(package) != before
