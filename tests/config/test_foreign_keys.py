"""Words of other trainers lead to the keys of this configuration."""

import attrs
import pytest

from skyrl_engine.config import load
from skyrl_engine.config.foreign_keys import RL, explain_word, key_for, words, words_of_rl
from skyrl_engine.config.schema import LoraConfig
from skyrl_engine.config.schema.rl import RewardKlConfig
from skyrl_engine.config.sections import sections
from skyrl_engine.config.structure import structure
from skyrl_engine.errors import ConfigError
from skyrl_engine.registry.kinds import KINDS
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
    inside = {"rl.kl": RewardKlConfig, "model.lora": LoraConfig}
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
    names = [name for of_distribution in KINDS[kind].first_party.values() for name in of_distribution]
    found = [load_plugin(registry.resolve(kind, name)).schema for name in names]
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
