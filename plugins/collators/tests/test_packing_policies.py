"""Bins of `packed`: the quick forms against the plain scan, the rules by hand, how full bins get, and what fits nowhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import Layout, Ragged, SampleLengths
from skyrl_engine.testing.error_checks import check_says_what_to_do
from skyrl_engine_collators.packed import bins_loops
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.packed.first_fit import first_fit_decreasing
from skyrl_engine_collators.packed.policies import bins_of
from skyrl_engine_collators.planning.alignment import alignment_of

pytestmark = pytest.mark.usefixtures("engine")

POLICIES = ("ffd", "balanced", "concat")


def lengths_of(tokens, *, units=None, ids=None):
    own = list(range(len(tokens)))
    arrays = (tokens, [1] * len(tokens), ids or own, own, units or own)
    return SampleLengths(*(np.asarray(array, dtype=np.int64) for array in arrays))


def pack_rows(tokens, *, collator=None, units=None, **layout):
    """Rank -> row -> samples of a single mini-batch."""
    plan = (collator or PackedCollator()).plan(lengths_of(tokens, units=units), Layout(**layout))
    (mini_batch,) = plan.mini_batches
    return [[row.samples.tolist() for row in rank] for rank in mini_batch.ranks]


def lists(bins):
    return [bins[number].tolist() for number in range(len(bins))]


@given(
    st.integers(1, 60).flatmap(lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=60))),
    st.integers(1, 6),
    st.sampled_from(POLICIES),
    st.booleans(),
    st.booleans(),
)
def test_bins_are_those_of_the_plain_scan(drawn, ranks, policy, limited, may_be_empty):
    capacity, sizes = drawn
    options = {"policy": policy, "capacity": capacity if limited else None, "ranks": ranks, "may_be_empty": may_be_empty}
    expected = bins_loops.bins_of(sizes, **options)
    array = np.asarray(sizes, dtype=np.int64)
    if expected is None:
        with pytest.raises(UnsupportedError, match="cannot fill"):
            bins_of(array, **options)
    else:
        assert lists(bins_of(array, **options)) == expected


@pytest.mark.parametrize(
    ("sizes", "capacity"),
    [
        (np.random.default_rng(0).integers(16, 257, 700), 2048),
        (np.random.default_rng(1).integers(1, 100_000, 700), 131_072),
        (np.random.default_rng(2).lognormal(5.5, 0.9, 700).clip(1, 8192).astype(np.int64), 8192),
        (np.full(300, 5), 12),
        (np.random.default_rng(4).permutation(700) + 1, 10**6),
        (np.random.default_rng(5).integers(1, 2**40, 300), 2**40),
    ],
    ids=["short", "lengths beyond 16 bits", "lognormal", "all equal", "all different", "lengths beyond 32 bits"],
)
def test_many_items_have_the_bins_of_the_plain_scan(sizes, capacity):
    assert lists(first_fit_decreasing(sizes, capacity)) == bins_loops.first_fit_decreasing(sizes.tolist(), capacity)


def test_first_fit_by_hand():
    """Sizes 5 5 4 3 2 1, capacity 8: 5 | 5 | 4 | 3 to the first 5, 2 to the second, 1 after it. Among equals the higher index is first."""
    assert lists(first_fit_decreasing(np.array([5, 2, 3, 5, 4, 1]), 8)) == [[3, 2], [0, 1, 5], [4]]


def test_new_bins_take_the_last_items_of_the_fullest():
    """Two bins, five ranks: donors by (count, index) are bin 1 then bin 0; bin 1 gives two, keeps one, and bin 0 gives the third."""
    options = {"policy": "concat", "capacity": 9, "ranks": 5, "may_be_empty": False}
    assert lists(bins_of(np.array([3, 3, 3, 4, 4, 1]), **options)) == [[0, 1], [3], [5], [4], [2]]


def test_rows_go_round_the_ranks_and_empty_ones_fill_up():
    assert pack_rows([8, 7, 6, 5], micro_batch_tokens=8, dp=2) == [[[0], [2]], [[1], [3]]]
    assert pack_rows([8, 7], micro_batch_tokens=8, dp=3) == [[[0]], [[1]], [[]]]
    assert pack_rows([1, 1, 1], micro_batch_tokens=8, dp=4) == [[[2]], [[0]], [[1]], [[]]]


@pytest.mark.parametrize("mini_batch_size", [3, 4, 8])
def test_the_whole_plan_has_the_rows_of_the_plan_one_after_the_other(mini_batch_size):
    """Mini-batches of one row for each sample, over two ranks: three (two of them with an empty row), two, or one."""
    lengths, layout = lengths_of([4] * 8), Layout(dp=2, micro_batch_tokens=4, mini_batch_size=mini_batch_size)
    rows = PackedCollator().plan(lengths, layout).micro_batches
    whole = PackedCollator().plan(lengths, layout).joined
    assert lists(Ragged(whole.samples, whole.row_offsets)) == [row.samples.tolist() for row in rows]
    if mini_batch_size == 4:
        assert whole.samples.tolist() == [3, 1, 2, 0, 7, 5, 6, 4], "rank by rank, although rows go round the ranks"


@pytest.mark.parametrize(
    ("layout", "alignment"),
    [
        ({}, 1),
        ({"tp": 4, "pp": 2}, 4),
        ({"tp": 3, "cp": 2}, 12),
    ],
)
def test_alignment(layout, alignment):
    assert alignment_of(Layout(**layout)) == alignment
    (row,) = PackedCollator().plan(lengths_of([1]), Layout(**layout)).micro_batches
    assert (row.alignment, row.width) == (alignment, alignment)


def test_strict_capacity_counts_the_alignment_and_true_lengths_do_not():
    """Lengths 5 and 3, two tensor parallel ranks: 6 + 4 in a row of 8 do not fit, 5 + 3 do and the row becomes 10 wide."""
    layout = {"micro_batch_tokens": 8, "tp": 2}
    assert pack_rows([5, 3], **layout) == [[[0], [1]]]
    loose = PackedCollator(strict_capacity=False)
    assert pack_rows([5, 3], collator=loose, **layout) == [[[0, 1]]]
    assert [row.width for row in loose.plan(lengths_of([5, 3]), Layout(**layout)).micro_batches] == [10]


def test_units_stay_in_one_row():
    assert pack_rows([3, 4, 3, 2], units=[7, 8, 7, 8], micro_batch_tokens=9) == [[[1, 3], [0, 2]]]
    assert pack_rows([3, 4, 3, 2], units=[7, 8, 7, 8], micro_batch_tokens=12) == [[[1, 3, 0, 2]]]


def test_the_smaller_limit_counts():
    for own, run in ((8, 100), (100, 8), (8, None), (None, 8)):
        collator = PackedCollator(max_tokens_per_microbatch=own)
        assert pack_rows([4, 4, 4], collator=collator, micro_batch_tokens=run) == [[[2, 1], [0]]]


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_limit_every_rank_has_one_row_of_its_share(policy):
    assert pack_rows([6, 1, 1, 1, 1, 1, 1], collator=PackedCollator(policy=policy), dp=2) == [[[0]], [[6, 5, 4, 3, 2, 1]]]


def test_balanced_rows_are_as_many_and_more_even():
    tokens = np.random.default_rng(3).lognormal(5.5, 0.8, 2000).clip(32, 2048).astype(np.int64)
    loads = {}
    for policy in ("ffd", "balanced"):
        plan = PackedCollator(policy=policy).plan(lengths_of(tokens), Layout(dp=8, micro_batch_tokens=8192))
        loads[policy] = [int(tokens[row.samples].sum()) for row in plan.micro_batches]
    assert len(loads["balanced"]) == len(loads["ffd"])
    assert max(loads["balanced"]) <= 8192
    assert max(loads["balanced"]) - min(loads["balanced"]) <= 32, "the shortest sample bounds the difference"


def test_concat_keeps_the_order():
    assert pack_rows([4, 4, 1, 7, 2], collator=PackedCollator(policy="concat"), micro_batch_tokens=8) == [[[0, 1], [2, 3], [4]]]


@pytest.mark.parametrize(
    ("collator", "lengths", "layout", "words"),
    [
        (PackedCollator(), lengths_of([4, 9], ids=[5, 6]), {}, ["sample 6 takes 9 tokens where", "holds 8", "at least 9"]),
        (PackedCollator(), lengths_of([5, 7]), {"tp": 5}, ["sample 1 takes 10 tokens (7 rounded up for the alignment of 5) where"]),
        (PackedCollator(), lengths_of([4, 5], units=[3, 3]), {}, ["samples [0, 1] of unit 3 take 9 tokens where"]),
        (PackedCollator(strict_capacity=False), lengths_of([5, 9]), {"tp": 5}, ["sample 1 takes 9 tokens where"]),
    ],
    ids=["sample", "aligned sample", "unit", "true length"],
)
def test_what_fits_nowhere_is_named(collator, lengths, layout, words):
    with pytest.raises(DataError) as caught:
        collator.plan(lengths, Layout(micro_batch_tokens=8, **layout))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    check_says_what_to_do(caught.value)


def test_fewer_samples_than_ranks_are_refused_where_no_row_may_be_empty():
    with pytest.raises(UnsupportedError, match=r"2 samples .* 3 packed rows") as caught:
        PackedCollator(strict_capacity=False).plan(lengths_of([5, 5]), Layout(micro_batch_tokens=8, dp=3))
    check_says_what_to_do(caught.value)


def test_counting_rows_is_refused():
    with pytest.raises(UnsupportedError, match="Set micro_batch_tokens") as caught:
        PackedCollator().plan(lengths_of([1]), Layout(micro_batch_rows=4))
    check_says_what_to_do(caught.value)


def test_a_large_batch_is_packed_tightly():
    """Every step is O(n log n): a quadratic one would not come back within a test's time limit. The bins are 0.1% from the volume's."""
    tokens = np.random.default_rng(0).lognormal(5.5, 0.8, 100_000).clip(16, 8192).astype(np.int64)
    lengths = lengths_of(tokens)
    plan = PackedCollator().plan(lengths, Layout(dp=8, micro_batch_tokens=8192))
    assert plan.expected_ids.tolist() == lengths.sample_ids.tolist(), "every sample once"
    assert len(first_fit_decreasing(tokens, 8192)) <= 1.001 * -(-int(tokens.sum()) // 8192)
