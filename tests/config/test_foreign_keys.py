"""Words of other trainers lead to the keys of this configuration."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import pytest

from skyrl_engine.config import foreign_keys, load
from skyrl_engine.config.foreign_keys import RL, explain_word, key_for, words, words_of_rl
from skyrl_engine.config.schema import EntropyControlConfig, LoraConfig
from skyrl_engine.config.schema.rl import RewardKlConfig
from skyrl_engine.config.sections import sections
from skyrl_engine.config.structure import structure
from skyrl_engine.errors import ConfigError
from skyrl_engine.registry.known import list_first_party
from skyrl_engine.registry.loader import load as load_plugin
from skyrl_engine.registry.resolve import Registry


def test_every_word_leads_to_a_key_of_the_schema_and_to_one_only():
    keys = [
        f"{name}.{key}"
        for name, section in sections().items()
        if attrs.has(section.schema)
        for key in attrs.fields_dict(section.schema)
    ]
    assert set(words()) <= set(keys)
    everything = [word for known in words().values() for word in known]
    assert len(set(everything)) == len(everything)
    assert all(key_for(word) == key and explain_word(word) for key, known in words().items() for word in known)


def test_every_word_of_reinforcement_leads_to_a_key_or_to_an_option_of_a_plugin():
    """And where two trainers have a word, each gets its own key."""
    keys = {
        f"{name}.{key}"
        for name, section in sections().items()
        if attrs.has(section.schema)
        for key in attrs.fields_dict(section.schema)
    }
    inside = {"rl.kl": RewardKlConfig, "rl.entropy": EntropyControlConfig, "model.lora": LoraConfig}
    keys |= {f"{key}.{name}" for key, schema in inside.items() for name in attrs.fields_dict(schema)}
    options = {key for key in words_of_rl() if key not in keys}
    for key in options:
        table, _, option = key.partition(".")
        kind = sections()[table].kind
        assert any(option in attrs.fields_dict(schema) for schema in _schemas(kind.name)), key
    everything = [word for known in words_of_rl().values() for word in known]
    assert len(set(everything)) == len(everything)
    assert all(key_for(word, RL) == key and explain_word(word, RL) for key, known in words_of_rl().items() for word in known)
    assert key_for("train_batch_size") == "training.batch_size"
    assert key_for("train_batch_size", RL) == "rl.groups"


def _schemas(kind):
    """The options of the project's own plugins of a kind."""
    registry = Registry.discover()
    found = [load_plugin(registry.resolve(kind, name)).schema for name in list_first_party(kind)]
    return [schema for schema in found if schema is not None]


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        ("training.per_device_train_batch_size=4", "Set training.micro_batch_rows (it counts the rows a rank computes"),
        ("training.sample_packing=true", 'Set collator.use ("packed" packs rows)'),
        ("packing=true", 'Set collator.use ("packed" packs rows)'),
        ("training.micro_batch_size=4", "Set training.micro_batch_rows"),
        ("training.gradient_accumulation_steps=4", "micro-batches accumulate until training.batch_size samples are done"),
        ("training.lr=1e-4", "Set optimizer.learning_rate"),
        ("training.learning_rate=1e-4", "Did you mean optimizer.learning_rate?"),
        ("optimizer.lr=1e-4", "Set optimizer.learning_rate"),
        ("lr=1e-4", "Set optimizer.learning_rate"),
        ("learning_rate=1e-4", "optimizer.learning_rate"),
        ("training.num_train_epochs=3", "Set training.epochs"),
        ("training.max_seq_length=512", "Set data.max_length"),
        ("data.max_seq_length=512", "Set data.max_length"),
        # nearer to a key of its table than to a word of others
        ("training.batchsize=4", 'Did you mean "batch_size"?'),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_ours(written, remedy):
    raw = load({"model": {"path": "m"}, "data": {"train": "d"}, "loss": {"use": "cross_entropy"}}, [written])
    with pytest.raises(ConfigError) as refused:
        structure(raw).config()
    assert remedy in str(refused.value)


def test_the_file_of_words_holds_rows_of_one_form_and_no_word_twice():
    tables = tomllib.loads((Path(foreign_keys.__file__).parent / "foreign_keys.toml").read_text())
    assert tables.keys() == {"any", "rl", "not_here"}
    for name, rows in tables.items():
        needed = {"words", "remedy"} if name == "not_here" else {"key", "words"}
        assert [row for row in rows if not needed <= row.keys() <= needed | {"remark"} or not row["words"]] == []
    everything = [re.sub(r"[^a-z0-9]+", "_", word) for name in ("rl", "not_here") for row in tables[name] for word in row["words"]]
    assert len(set(everything)) == len(everything)
    read = foreign_keys.read_foreign_keys()
    assert sum(len(words) for words in read.words.values()) == len(read.of_any) > 100
    assert sum(len(words) for words in read.words_of_rl.values()) == len(read.of_rl) > 150


def test_files_of_words_and_of_first_party_plugins_are_read_when_they_are_asked_for():
    code = """
import skyrl_engine.config, skyrl_engine.config.structure, skyrl_engine.registry.suggest
from skyrl_engine.config.foreign_keys import read_foreign_keys
from skyrl_engine.registry.known import read_first_party
assert skyrl_engine.config.from_dict({}, "a test")
print(read_foreign_keys.cache_info().currsize, read_first_party.cache_info().currsize)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["0", "0"]
