"""The entry points: options, the run's own values, overlong samples, and what importing them costs."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points

import attrs
import numpy as np
import pytest

from skyrl_engine import DataError
from skyrl_engine.contracts import FactoryContext, Layout, MicroBatchPlan, SampleColumns, collate, one_sample_per_row
from skyrl_engine.contracts.values import ingest
from skyrl_engine.testing.error_checks import check_says_what_to_do
from skyrl_engine_collators import kernels
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.plugin import PackedConfig, PaddedConfig, packed, padded

COLUMNS = SampleColumns.from_lists(input_ids=[[1, 2, 3], [4], [5, 6]], num_actions=[1, 0, 1], sample_ids=np.array([7, 8, 9]))


def make(config=None, **context):
    return padded.skyrl_engine_make_collator(config=config, context=FactoryContext(**context))


def test_both_names_lead_to_one_object():
    plugins = {point.name: point.value for point in entry_points(group="skyrl_engine.collator")}
    assert plugins["padded"] == "skyrl_engine_collators.plugin:padded"
    assert plugins.get("trajectory", plugins["padded"]) == plugins["padded"]
    assert padded.skyrl_engine_config_schema() is PaddedConfig


def test_importing_the_entry_point_imports_nothing_heavy():
    code = (
        "import sys, skyrl_engine_collators.plugin\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'pyarrow', 'transformers', 'ray'}))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_the_pad_token_is_the_runs_unless_set():
    assert collate(make(pad_token_id=5), COLUMNS)["input_ids"][1].tolist() == [5, 5, 4]
    assert collate(make(PaddedConfig(pad_token_id=0), pad_token_id=5), COLUMNS)["input_ids"][1].tolist() == [0, 0, 4]


def test_a_batch_as_printed_in_the_specification():
    """Prompts [1, 2], [4], [5]; responses [3], [], [6]."""
    batch = collate(make(pad_token_id=9), COLUMNS)
    assert {name: tensor.tolist() for name, tensor in batch.fields.items()} == {
        "input_ids": [[1, 2, 3], [9, 9, 4], [9, 5, 6]],
        "attention_mask": [[1, 1, 1], [0, 0, 1], [0, 1, 1]],
        "position_ids": [[0, 1, 2], [0, 0, 0], [0, 0, 1]],
        "response_mask": [[1], [0], [1]],
        "loss_weight": [[1.0], [0.0], [1.0]],
    }
    assert (batch.gather.actions.tolist(), batch.gather.rows.tolist(), batch.gather.columns.tolist()) == ([0, 1], [0, 2], [1, 1])


@pytest.mark.parametrize("call", ["plan", "collate"])
@pytest.mark.parametrize("collator", ["padded", "packed"])
def test_an_overlong_sample_is_an_error_that_names_it(collator, call):
    collator = (make if collator == "padded" else make_packed)(max_sequence_length=2)
    with pytest.raises(DataError, match=r"1 of 3 samples are longer than max_sequence_length = 2: 7 \(3 tokens\)") as caught:
        collator.plan(COLUMNS.lengths, Layout()) if call == "plan" else collate(collator, COLUMNS)
    check_says_what_to_do(caught.value)


def test_an_overlong_sample_is_a_warning_where_asked(caplog):
    collator = make(PaddedConfig(overlong="warn", max_sequence_length=1), max_sequence_length=100)
    with caplog.at_level(logging.WARNING):
        assert collate(collator, COLUMNS)["input_ids"].shape == (3, 3)
    assert len(caplog.records) == 1
    assert "7 (3 tokens), 9 (2 tokens)" in caplog.text


def test_many_overlong_samples_are_counted():
    columns = SampleColumns.from_lists(input_ids=[[1, 2]] * 7)
    with pytest.raises(DataError, match=r"4 \(2 tokens\) and 2 more"):
        collate(make(max_sequence_length=1), columns)


def test_a_plan_for_other_columns_is_refused_before_anything_is_written():
    for width, action_width in ((2, 1), (3, 0)):
        with pytest.raises(DataError, match="sample 7 has 3 tokens and 1 response tokens") as caught:
            make().build(COLUMNS, one_sample_per_row(np.array([1, 0]), width, action_width))
        check_says_what_to_do(caught.value)


def make_packed(config=None, **context):
    return packed.skyrl_engine_make_collator(config=config, context=FactoryContext(**context))


def test_packed_takes_its_options_and_the_runs_values():
    assert packed.skyrl_engine_config_schema() is PackedConfig
    assert make_packed(pad_token_id=5, max_sequence_length=9) == PackedCollator(pad_token_id=5, max_sequence_length=9)
    options = {"policy": "concat", "max_tokens_per_microbatch": 8, "strict_capacity": False, "overlong": "warn"}
    chosen = make_packed(PackedConfig(**options, pad_token_id=0, max_sequence_length=3), pad_token_id=5, max_sequence_length=9)
    assert chosen == PackedCollator(**options, pad_token_id=0, max_sequence_length=3)


def test_a_packed_batch_as_printed_in_the_specification():
    """Sequences of 3, 1 and 2 tokens, rounded up to 2, in rows of 6: [1, 2, 3] and [5, 6]; then [4]."""
    batch = collate(make_packed(PackedConfig(max_tokens_per_microbatch=6), pad_token_id=9), COLUMNS, Layout(tp=2))
    assert {name: tensor.tolist() for name, tensor in batch.fields.items()} == {
        "input_ids": [[1, 2, 3, 9, 5, 6], [4, 9, 9, 9, 9, 9]],
        "attention_mask": [[1, 1, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 0, 0, 1], [0, 0, 0, 0, 0, 0]],
        "loss_weight": [[0.0, 1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]],
    }
    assert [offsets.tolist() for offsets in batch.cu_seqlens] == [[0, 4, 6], [0, 2]]
    assert [lengths.tolist() for lengths in batch.sequence_lengths] == [[3, 2], [1]]
    assert (batch.gather.actions.tolist(), batch.gather.rows.tolist(), batch.gather.columns.tolist()) == ([0, 1], [0, 0], [1, 4])


def test_packed_refuses_plans_for_other_columns():
    row = MicroBatchPlan(np.array([0, 2]), np.array([0, 2]), 4, 3)
    with pytest.raises(DataError, match=r"samples \[7, 9\] occupy 5 tokens of a packed row, the plan's rows hold 4") as caught:
        make_packed().build(COLUMNS, row)
    check_says_what_to_do(caught.value)
    with pytest.raises(DataError, match="occupy 6 tokens"):
        make_packed().build(COLUMNS, MicroBatchPlan(np.array([0, 2]), np.array([0, 2]), 5, 4, alignment=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "best"},
        {"max_tokens_per_microbatch": 0},
        {"strict_capacity": 1},
        {"pad_token_id": -1},
        {"max_sequence_length": 0},
        {"overlong": "cut"},
    ],
)
def test_options_of_packed_are_checked(wrong):
    with pytest.raises((ValueError, TypeError)):
        PackedConfig(**wrong)


@pytest.mark.parametrize("wrong", [{"pad_token_id": -1}, {"max_sequence_length": 0}, {"overlong": "cut"}])
def test_options_are_checked(wrong):
    with pytest.raises(ValueError):
        PaddedConfig(**wrong)
    assert attrs.has(PaddedConfig)


def test_lists_are_read_by_this_distribution_without_being_told():
    (point,) = entry_points(group="skyrl_engine.list_reader")
    assert point.load() is kernels.read_lists
    assert ingest.find_reader() is kernels.read_lists
