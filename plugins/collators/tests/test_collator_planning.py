"""Plans of `padded`: which samples share a micro-batch, how well ranks are balanced, and what fits nowhere."""

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from skyrl_engine import DataError
from skyrl_engine.contracts import Layout, SampleLengths
from skyrl_engine.testing.error_checks import check_says_what_to_do
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded import plan_loops
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_collators.planning.ranks import balance, largest_first


def lengths_of(tokens, *, actions=None, groups=None, units=None, ids=None):
    own = list(range(len(tokens)))
    arrays = (tokens, actions or [1] * len(tokens), ids or own, groups or own, units or own)
    return SampleLengths(*(np.asarray(array, dtype=np.int64) for array in arrays))


def plan_of(lengths, **layout):
    return PaddedCollator().plan(lengths, Layout(**layout))


def shape_of(plan):
    """mini-batch -> rank -> micro-batch -> samples."""
    return [[[micro_batch.samples.tolist() for micro_batch in rank] for rank in mini.ranks] for mini in plan.mini_batches]


def test_without_a_limit_a_rank_has_one_micro_batch_in_the_given_order():
    assert shape_of(plan_of(lengths_of([3, 9, 4, 1]))) == [[[[0, 1, 2, 3]]]]


def test_rows_limit_a_micro_batch_and_join_like_lengths():
    assert shape_of(plan_of(lengths_of([3, 9, 4, 1, 5]), micro_batch_rows=2)) == [[[[1, 4], [0, 2], [3]]]]


def test_the_order_is_kept_where_lengths_are_not_grouped():
    plan = PaddedCollator(group_by_length=False).plan(lengths_of([3, 9, 4, 1, 5]), Layout(micro_batch_rows=2))
    assert shape_of(plan) == [[[[0, 1], [2, 3], [4]]]]
    plan = PaddedCollator(group_by_length=False).plan(lengths_of([3, 8, 2, 7, 3]), Layout(micro_batch_tokens=16))
    assert shape_of(plan) == [[[[0, 1], [2, 3], [4]]]]


@pytest.mark.usefixtures("engine")
@given(st.data())
def test_a_plan_equals_its_reference_loops(data):
    """Any lengths, groups and units that overlap, limits together and alone, more ranks than units."""
    count = data.draw(st.integers(0, 12))
    few = st.one_of(st.just(list(range(count))), st.lists(st.integers(0, count), min_size=count, max_size=count))
    lengths = SampleLengths(
        tokens=np.array(data.draw(st.lists(st.integers(0, 8), min_size=count, max_size=count)), dtype=np.int64),
        actions=np.zeros(count, dtype=np.int64),
        sample_ids=np.arange(count),
        group_ids=np.array(data.draw(few), dtype=np.int64),
        unit_ids=np.array(data.draw(few), dtype=np.int64),
    )
    layout = Layout(
        dp=data.draw(st.integers(1, 4)),
        mini_batch_size=data.draw(st.none() | st.integers(1, 12)),
        micro_batch_rows=data.draw(st.none() | st.integers(1, 6)),
        micro_batch_tokens=data.draw(st.none() | st.integers(1, 30)),
    )
    grouped = data.draw(st.booleans())
    try:
        plan = PaddedCollator(group_by_length=grouped).plan(lengths, layout)
    except DataError:
        reject()
    assert shape_of(plan) == plan_loops.plan(lengths, layout, group_by_length=grouped)
    for micro_batch in plan.micro_batches:
        widths = lengths.tokens[micro_batch.samples]
        assert (micro_batch.width, micro_batch.action_width) == ((widths.max(), 0) if len(widths) else (1, 0))
        assert micro_batch.row_offsets.tolist() == (list(range(len(widths) + 1)) if len(widths) else [0, 0])
    for mini_batch in plan.mini_batches:
        for rank in mini_batch.ranks:
            assert [micro_batch.following for micro_batch in rank] == [rank[place + 1 :] for place in range(len(rank))]


def test_samples_of_like_length_share_a_micro_batch_of_few_rows():
    """In the given order a third of four rows is padding."""
    tokens = np.random.default_rng(0).integers(16, 257, 1024)
    shares = {}
    for grouped in (True, False):
        plan = PaddedCollator(group_by_length=grouped).plan(lengths_of(tokens), Layout(dp=8, micro_batch_rows=4))
        shares[grouped] = 1 - tokens.sum() / plan.dense_tokens
    assert shares[True] < 0.03
    assert shares[False] > 0.25


def test_units_of_like_width_share_a_micro_batch_whatever_they_cost():
    """Widths 9, 6, 8 and 5, and 10, 12, 9 and 10 tokens in all."""
    lengths = lengths_of([9, 1, 6, 6, 8, 1, 5, 5], units=[0, 0, 1, 1, 2, 2, 3, 3])
    assert shape_of(plan_of(lengths, micro_batch_rows=4)) == [[[[0, 1, 4, 5], [2, 3, 6, 7]]]]


def test_ranks_take_equally_many_rows_where_rows_limit_a_micro_batch():
    """One sample of 100 tokens weighs as much as the seven others, but both ranks get two micro-batches of two rows."""
    plan = plan_of(lengths_of([100, 1, 1, 1, 1, 1, 1, 1]), dp=2, micro_batch_rows=2)
    assert [[len(samples) for samples in rank] for rank in shape_of(plan)[0]] == [[2, 2], [2, 2]]


def test_tokens_balance_ranks_where_nothing_else_does():
    plan = plan_of(lengths_of([6, 1, 1, 1, 1, 1, 1]), dp=2)
    assert shape_of(plan) == [[[[0]], [[1, 2, 3, 4, 5, 6]]]]


def test_a_budget_counts_padding_and_joins_like_lengths():
    """8 + 7 fill two rows of 8; 3, 3 and 2 three rows of 3; in the given order the budget would need more micro-batches."""
    plan = plan_of(lengths_of([3, 8, 2, 7, 3]), micro_batch_tokens=16)
    assert shape_of(plan) == [[[[1, 3], [0, 2, 4]]]]
    assert [(micro_batch.rows, micro_batch.width) for micro_batch in plan.micro_batches] == [(2, 8), (3, 3)]


def test_both_limits_hold_together():
    plan = plan_of(lengths_of([2, 2, 2, 2, 2]), micro_batch_tokens=8, micro_batch_rows=3)
    assert [len(micro_batch.samples) for micro_batch in plan.micro_batches] == [3, 2]


def test_a_limit_of_any_size_is_a_limit():
    for huge in (2**31, 2**63, 2**70):
        assert shape_of(plan_of(lengths_of([2, 3]), micro_batch_rows=huge, micro_batch_tokens=huge)) == [[[[0, 1]]]]


def test_lengths_of_no_token_count_as_one():
    """Columns have no such sample; whoever plans by hand may."""
    assert shape_of(plan_of(lengths_of([0, 3]), micro_batch_tokens=4)) == [[[[1], [0]]]]
    assert shape_of(plan_of(lengths_of([0, 0, 0]), micro_batch_tokens=2)) == [[[[0, 1], [2]]]]


def test_ranks_without_work_get_rows_without_samples():
    plan = plan_of(lengths_of([3], actions=[2]), dp=3)
    assert shape_of(plan) == [[[[0]], [[]], [[]]]]
    empty = plan.mini_batches[0].ranks[1][0]
    assert (empty.rows, empty.width, empty.action_width) == (1, 1, 0)


def test_rows_without_samples_have_their_places_in_the_order():
    """A rank whose one sample fills its micro-batch, next to a rank that has three micro-batches."""
    plan = plan_of(lengths_of([100, 51, 26, 11, 11, 1]), dp=2, micro_batch_tokens=100)
    assert shape_of(plan) == [[[[0], [], []], [[1], [2, 3, 4], [5]]]]
    for rank in plan.mini_batches[0].ranks:
        assert [micro_batch.following for micro_batch in rank] == [rank[place + 1 :] for place in range(len(rank))]
    assert {micro_batch.alignment for micro_batch in plan.micro_batches} == {1}


def test_mini_batches_take_whole_groups_in_the_given_order():
    groups = [0, 0, 1, 1, 1, 2]
    assert [mini.samples.tolist() for mini in plan_of(lengths_of([1] * 6, groups=groups), mini_batch_size=4).mini_batches] == [
        [0, 1],
        [2, 3, 4, 5],
    ]
    scattered = [0, 1, 0, 1, 2, 2]
    plan = plan_of(lengths_of([1] * 6, groups=scattered), mini_batch_size=4)
    assert [mini.samples.tolist() for mini in plan.mini_batches] == [[0, 1, 2, 3], [4, 5]]


def test_units_stay_together_even_where_they_join_groups():
    """Group 0 is {1, 2}, group 1 is {3, 4}; the unit {2, 3} ties all four to one mini-batch."""
    lengths = lengths_of([1] * 5, groups=[2, 0, 0, 1, 1], units=[3, 0, 1, 1, 2])
    for collator in (PaddedCollator(), PackedCollator()):
        plan = collator.plan(lengths, Layout(mini_batch_size=4))
        assert [sorted(mini.samples.tolist()) for mini in plan.mini_batches] == [[0], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("lengths", "layout", "words"),
    [
        (lengths_of([4, 9, 3], ids=[5, 6, 7]), {"micro_batch_tokens": 8}, ["sample 6 takes 9 tokens", "holds 8", "at least 9"]),
        (lengths_of([4, 5], units=[3, 3]), {"micro_batch_tokens": 9}, ["samples [0, 1] of unit 3", "10 tokens", "at least 10"]),
        (lengths_of([4, 5], units=[3, 3]), {"micro_batch_rows": 1}, ["samples [0, 1] of unit 3", "2 rows", "at least 2"]),
        (lengths_of([1] * 4, groups=[7, 8, 8, 8], ids=[4, 5, 6, 7]), {"mini_batch_size": 2}, ["sample 5", "group 8", "at least 3"]),
    ],
    ids=["sample", "unit by tokens", "unit by rows", "group"],
)
def test_what_fits_nowhere_is_named(lengths, layout, words):
    with pytest.raises(DataError) as caught:
        plan_of(lengths, **layout)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    check_says_what_to_do(caught.value)


def test_no_samples_no_mini_batches():
    assert plan_of(lengths_of([]), dp=2, mini_batch_size=3).mini_batches == ()


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5), st.integers(0, 3))
def test_balance_keeps_its_bound_and_its_cap(costs, ranks, slack):
    """Graham (1969): longest first is at most 4/3 - 1/(3 ranks) of the best; the best is at least the mean and the largest item.

    The bound below uses what list scheduling promises against these two: mean + largest. It does not hold under a cap.
    """
    array = np.asarray(costs, dtype=np.int64)
    chosen = balance(array, ranks)
    loads = np.bincount(chosen, weights=array, minlength=ranks)
    assert loads.max(initial=0) <= sum(costs) / ranks + max(costs, default=0)
    assert chosen.tolist() == balance(array, ranks).tolist()
    most = -(-len(costs) // ranks) + slack
    capped = balance(array, ranks, most=most)
    assert np.bincount(capped, minlength=ranks).max(initial=0) <= most


def test_nothing_has_an_order_too():
    assert largest_first(np.zeros(0, dtype=np.int64)).tolist() == []


def test_a_large_batch_is_balanced_and_little_is_padded():
    """Every step is O(n log n): a quadratic one would not come back within a test's time limit."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(16, 4096, 50_000)
    plan = plan_of(lengths_of(tokens), dp=8, micro_batch_tokens=16_384)
    loads = [sum(tokens[micro_batch.samples].sum() for micro_batch in rank) for rank in plan.mini_batches[0].ranks]
    assert max(loads) - min(loads) <= 4096
    padded = sum(micro_batch.rows * micro_batch.width for micro_batch in plan.micro_batches)
    assert padded < 1.02 * tokens.sum(), "longest first leaves little padding"
