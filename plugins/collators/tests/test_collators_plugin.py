"""The entry points: options, the run's own values, overlong samples, and what importing them costs."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points

import attrs
import numpy as np
import pytest

from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.context import FactoryContext
from skyrl_engine.contracts.plan import Layout, one_sample_per_row
from skyrl_engine.errors import DataError
from skyrl_engine_collators.plugin import PaddedConfig, padded

COLUMNS = SampleColumns.from_lists(input_ids=[[1, 2, 3], [4], [5, 6]], num_actions=[1, 0, 1], sample_ids=np.array([7, 8, 9]))


def make(config=None, **context):
    return padded.skyrl_engine_make_collator(config=config, context=FactoryContext(**context))


def test_both_names_lead_to_one_object():
    found = {point.name: point.value for point in entry_points(group="skyrl_engine.collator")}
    assert found["padded"] == "skyrl_engine_collators.plugin:padded"
    assert found.get("trajectory", found["padded"]) == found["padded"]
    assert padded.skyrl_engine_config_schema() is PaddedConfig


def test_importing_the_entry_point_imports_nothing_heavy():
    code = (
        "import sys, skyrl_engine_collators.plugin\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'pyarrow', 'transformers', 'ray'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_pad_token_is_the_runs_unless_set():
    assert make(pad_token_id=5).collate(COLUMNS)["input_ids"][1].tolist() == [5, 5, 4]
    assert make(PaddedConfig(pad_token_id=0), pad_token_id=5).collate(COLUMNS)["input_ids"][1].tolist() == [0, 0, 4]


def test_a_batch_as_printed_in_the_specification():
    """Prompts [1, 2], [4], [5]; responses [3], [], [6]."""
    batch = make(pad_token_id=9).collate(COLUMNS)
    assert {name: tensor.tolist() for name, tensor in batch.fields.items()} == {
        "input_ids": [[1, 2, 3], [9, 9, 4], [9, 5, 6]],
        "attention_mask": [[1, 1, 1], [0, 0, 1], [0, 1, 1]],
        "position_ids": [[0, 1, 2], [0, 0, 0], [0, 0, 1]],
        "response_mask": [[1], [0], [1]],
        "loss_weight": [[1.0], [0.0], [1.0]],
    }
    assert (batch.gather.actions.tolist(), batch.gather.rows.tolist(), batch.gather.columns.tolist()) == ([0, 1], [0, 2], [1, 1])


@pytest.mark.parametrize("call", ["plan", "collate"])
def test_an_overlong_sample_is_an_error_that_names_it(call):
    collator = make(max_sequence_length=2)
    with pytest.raises(DataError, match=r"1 of 3 samples are longer than max_sequence_length = 2: 7 \(3 tokens\)"):
        collator.plan(COLUMNS.lengths, Layout()) if call == "plan" else collator.collate(COLUMNS)


def test_an_overlong_sample_is_a_warning_where_asked(caplog):
    collator = make(PaddedConfig(overlong="warn", max_sequence_length=1), max_sequence_length=100)
    with caplog.at_level(logging.WARNING):
        assert collator.collate(COLUMNS)["input_ids"].shape == (3, 3)
    assert len(caplog.records) == 1
    assert "7 (3 tokens), 9 (2 tokens)" in caplog.text


def test_many_overlong_samples_are_counted():
    columns = SampleColumns.from_lists(input_ids=[[1, 2]] * 7)
    with pytest.raises(DataError, match=r"4 \(2 tokens\) and 2 more"):
        make(max_sequence_length=1).collate(columns)


def test_a_plan_for_other_columns_is_refused_before_anything_is_written():
    for width, action_width in ((2, 1), (3, 0)):
        with pytest.raises(DataError, match="sample 7 has 3 tokens and 1 response tokens"):
            make().build(COLUMNS, one_sample_per_row(np.array([1, 0]), width, action_width))


@pytest.mark.parametrize("wrong", [{"pad_token_id": -1}, {"max_sequence_length": 0}, {"overlong": "cut"}])
def test_options_are_checked(wrong):
    with pytest.raises(ValueError):
        PaddedConfig(**wrong)
    assert attrs.has(PaddedConfig)
