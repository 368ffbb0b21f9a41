"""Words of other trainers lead to the keys of this configuration."""

import attrs
import pytest

from skyrl_engine.config import load
from skyrl_engine.config.other_words import key_for, meant, words
from skyrl_engine.config.sections import sections
from skyrl_engine.config.structure import structure
from skyrl_engine.errors import ConfigError


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
    assert all(key_for(word) == key and meant(word) for key, known in words().items() for word in known)


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
