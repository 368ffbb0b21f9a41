"""`tree` under the conformance kit, and against its plain definition."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import Layout, SampleColumns, collate, find_common_prefixes, measure_lengths
from skyrl_engine.testing import CollatorConformance
from skyrl_engine.testing.collators import strategies
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.tree import loops
from skyrl_engine_collators.tree.collator import TreeCollator

PAD = 151_643


class TestTree(CollatorConformance):
    def collator(self):
        return TreeCollator(PAD)

    def reference(self, columns, micro_batch):
        return loops.build_fields(columns, micro_batch, PAD)

    def layouts(self, lengths):
        """Rows of trees are cut by tokens alone."""
        return strategies.layouts(lengths).map(lambda layout: evolve(layout, micro_batch_rows=None))


EVERY = TreeCollator(PAD, least_shared=1)
"""Shares prefixes of any length."""


def plan_trees(columns, layout):
    return EVERY.plan(measure_lengths(EVERY, columns), layout)


@given(st.data())
def test_the_gather_index_and_the_segments_are_those_of_the_definition(data):
    columns = data.draw(strategies.with_prefixes(data.draw(strategies.sample_columns(max_samples=9, max_length=9))))
    layout = evolve(data.draw(strategies.layouts(columns.lengths)), micro_batch_rows=None)
    plan = plan_trees(columns, layout)
    for micro_batch in (*plan.micro_batches, plan.joined):
        batch = TreeCollator(PAD).build(columns, micro_batch)
        gather = batch.gather
        entries = list(zip(gather.actions.tolist(), gather.rows.tolist(), gather.columns.tolist(), strict=True))
        assert entries == loops.gather_index(columns, micro_batch)
        for row in range(micro_batch.rows):
            segments = tuple(ragged[row].tolist() for ragged in (batch.tree.lengths, batch.tree.parents, batch.tree.last_segments))
            assert segments == loops.prefix_tree(columns, micro_batch, row)


@given(st.data())
def test_no_row_computes_more_than_the_budget_and_whole_trees_that_fit_are_computed_once(data):
    columns = data.draw(strategies.with_prefixes(data.draw(strategies.sample_columns(max_samples=9, max_length=9))))
    units = np.unique(columns.unit_ids, return_inverse=True)[1]
    largest = int(np.bincount(units, np.diff(columns.token_offsets)).max())
    budget = largest + data.draw(st.integers(0, 40))
    plan = plan_trees(columns, Layout(micro_batch_tokens=budget))
    assert all(micro_batch.width <= budget for micro_batch in plan.micro_batches)
    lengths = measure_lengths(EVERY, columns)
    everything = int(lengths.tokens.sum() - lengths.prefixes.shared.sum())
    assert plan.dense_tokens >= everything
    if everything <= budget:
        assert plan.dense_tokens == everything


@given(st.data())
def test_samples_without_a_common_prefix_are_laid_out_as_packed_does(data):
    columns = data.draw(strategies.sample_columns(max_samples=9, max_length=9))
    lengths = columns.lengths
    tree, packed = TreeCollator(PAD), PackedCollator(PAD)
    layout = Layout(dp=data.draw(st.integers(1, 3)))
    plan = tree.plan(lengths, layout)
    for one, other in zip(plan.micro_batches, packed.plan(lengths, layout).micro_batches, strict=True):
        assert sorted(one.samples.tolist()) == sorted(other.samples.tolist())
        built, due = tree.build(columns, one), packed.build(columns, evolve(other, samples=one.samples))
        for name in ("input_ids", "attention_mask", "position_ids"):
            assert built[name].equal(due[name])


def group(*answers, prompt=tuple(range(20))):
    return SampleColumns.from_lists(input_ids=[[*prompt, *answer] for answer in answers], num_actions=[len(a) for a in answers])


def test_a_group_by_hand():
    columns = group([30, 31, 32], [40, 41], [30, 31, 50])
    batch = collate(TreeCollator(PAD), columns)
    order = [0, 2, 1] if batch["input_ids"][0, 20] == 30 else [1, 0, 2]
    assert order == [0, 2, 1], "in the order of bytes"
    assert batch["input_ids"].tolist() == [[*range(20), 30, 31, 32, 50, 40, 41]]
    assert batch["position_ids"].tolist() == [[*range(20), 20, 21, 22, 22, 20, 21]]
    # the answers of samples 0, 2 and 1: each first token is predicted by the prompt's last
    assert batch.gather.columns.tolist() == [19, 20, 21, 19, 20, 21, 19, 24]
    assert batch.tree.lengths[0].tolist() == [20, 2, 1, 1, 2]
    assert batch.tree.parents[0].tolist() == [-1, 0, 1, 1, 0]
    assert batch.tree.last_segments[0].tolist() == [2, 3, 4]


def test_prefixes_of_fewer_than_sixteen_tokens_are_not_looked_for():
    columns = group([30, 31], [40, 41], prompt=range(15))
    assert collate(TreeCollator(PAD), columns)["input_ids"].shape == (1, 34)
    assert not find_common_prefixes(columns.input_ids, columns.token_offsets).shared.any()


def test_a_tree_that_is_too_large_is_cut_where_least_is_computed_twice():
    """Two prompts behind one system prompt, four answers each: rows that hold one prompt's answers, not halves of both."""
    system, prompts = list(range(100, 120)), [list(range(200, 260)), list(range(300, 360))]
    rows = [[*system, *prompt, answer, answer + 1, answer + 2] for prompt in prompts for answer in range(4)]
    columns = SampleColumns.from_lists(input_ids=rows, num_actions=[3] * 8)
    plan = plan_trees(columns, Layout(micro_batch_tokens=100))
    assert [sorted(micro_batch.samples.tolist()) for micro_batch in plan.micro_batches] == [[4, 5, 6, 7], [0, 1, 2, 3]] or [
        sorted(micro_batch.samples.tolist()) for micro_batch in plan.micro_batches
    ] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan.dense_tokens == 2 * (20 + 60 + 12)


def test_a_chain_of_thousands_of_branches_is_cut_without_recursion():
    ids = np.arange(3000)
    columns = SampleColumns.from_lists(input_ids=[ids[: 1 + length] for length in range(2999)], num_actions=[1] * 2999)
    plan = plan_trees(columns, Layout(micro_batch_tokens=3000))
    assert all(micro_batch.width <= 3000 for micro_batch in plan.micro_batches)


def test_a_group_that_is_split_over_ranks_is_shared_within_each():
    columns = group(*[[30 + 10 * answer + place for place in range(5)] for answer in range(6)])
    plan = plan_trees(columns, Layout(dp=2))
    assert [micro_batch.width for micro_batch in plan.micro_batches] == [20 + 3 * 5] * 2


def test_rows_of_other_samples_than_those_that_were_planned_are_refused():
    columns, other = group([30, 31], [40, 41]), group([30, 31], [40, 41], prompt=range(1, 21))
    joined = plan_trees(columns, Layout()).joined
    mixed = SampleColumns.from_lists(input_ids=[columns.input_ids[:22], other.input_ids[22:]], num_actions=[2, 2])
    with pytest.raises(DataError, match="does not begin with the first 20 tokens"):
        TreeCollator(PAD).build(mixed, joined)
    with pytest.raises(DataError, match="occupy 24 tokens of a row"):
        TreeCollator(PAD).build(columns, evolve(joined, width=23))


def test_layouts_that_count_rows_are_refused():
    with pytest.raises(UnsupportedError, match="micro_batch_rows says nothing"):
        plan_trees(group([30, 31], [40, 41]), Layout(micro_batch_rows=2))


def test_a_unit_that_fits_nowhere_is_named():
    columns = group([30, 31], [40, 41])
    with pytest.raises(DataError, match=r"sample [01] takes 22 tokens where a row holds 21"):
        plan_trees(columns, Layout(micro_batch_tokens=21))
    with pytest.raises(DataError, match=r"samples \[0, 1\] of unit 0 take 24 tokens where a row holds 23"):
        plan_trees(evolve(columns, unit_ids=np.zeros(2, dtype=np.int64)), Layout(micro_batch_tokens=23))
