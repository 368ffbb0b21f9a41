"""Corners of planning and building that random batches do not reach: many equal samples, limits of number types, long messages."""

import logging
import random

import numpy as np
import pytest

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import Bundles, Layout, MicroBatchPlan, SampleColumns, SampleLengths
from skyrl_engine.testing.error_checks import check_says_what_to_do
from skyrl_engine_collators import kernels as choice
from skyrl_engine_collators.overlong import check_maximum_length
from skyrl_engine_collators.packed import bins_loops
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.packed.first_fit import first_fit_decreasing, stable_order
from skyrl_engine_collators.packed.policies import bins_of
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_collators.padded.vectorized import _concatenate_values
from skyrl_engine_collators.planning.ranks import balance

MANY = 200
"""Equal items beyond which NumPy's quick sort no longer keeps their order by chance."""


def lengths_of(tokens, *, units=None, ids=None):
    own = list(range(len(tokens)))
    arrays = (tokens, [1] * len(tokens), ids or own, own, units or own)
    return SampleLengths(*(np.asarray(array, dtype=np.int64) for array in arrays))


def test_among_equal_costs_the_earlier_item_goes_first_and_to_the_lower_rank():
    generator = random.Random(0)
    costs = [generator.choice((1, 5, 7)) for _ in range(MANY)]
    loads, expected = [0, 0, 0], {}
    for item in sorted(range(MANY), key=lambda item: -costs[item]):
        expected[item] = loads.index(min(loads))
        loads[expected[item]] += costs[item]
    assert balance(np.array(costs), 3).tolist() == [expected[item] for item in range(MANY)]


def test_among_equal_lengths_a_budget_keeps_the_order():
    plan = PaddedCollator().plan(lengths_of([1, 2] * (MANY // 2)), Layout(micro_batch_tokens=20))
    order = [sample for row in plan.mini_batches[0].ranks[0] for sample in row.samples.tolist()]
    parts = [row.samples.tolist() for row in plan.mini_batches[0].ranks[0]]
    assert all(part == sorted(part) for part in parts)
    assert order == [*range(1, MANY, 2), *range(0, MANY, 2)]


def test_bundles_keep_the_order_of_their_samples():
    labels = np.array([place % 2 for place in range(MANY)])
    bundles = Bundles.by_label(np.arange(MANY), labels)
    assert [bundles.members[number].tolist() for number in range(2)] == [list(range(0, MANY, 2)), list(range(1, MANY, 2))]


@pytest.mark.parametrize("largest", [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 2**17 + 1, 2**40])
def test_stable_order_is_that_of_python_at_the_limits_of_16_bits(largest):
    generator = random.Random(0)
    keys = [generator.choice((0, 1, largest // 2, largest - (largest > 0), largest)) for _ in range(MANY)]
    assert stable_order(np.array(keys)).tolist() == sorted(range(MANY), key=lambda place: keys[place])


@pytest.fixture
def on_numpy(monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "numpy")


def test_a_bin_is_not_forgotten_while_it_has_room_for_exactly_one_more_of_the_size_at_hand(on_numpy):
    """4, then 2 + 2 + 2 leave room for 2 in a bin of 12, and no 2 is left: the 1 goes there as well."""
    sizes, options = [4, 2, 2, 2, 1], {"policy": "ffd", "capacity": 12, "ranks": 1, "may_be_empty": True}
    bins = bins_of(np.array(sizes), **options)
    assert [bins[number].tolist() for number in range(len(bins))] == [[0, 3, 2, 1, 4]]


@pytest.mark.parametrize("capacity", [8, 24, 100])
def test_few_sizes_and_many_items_have_the_bins_of_the_plain_scan(on_numpy, capacity):
    """Long runs of equal sizes, which fill bins exactly, leave exactly one more place, or less."""
    generator = random.Random(capacity)
    for _ in range(40):
        kinds = [generator.randint(1, capacity) for _ in range(generator.randint(1, 4))]
        sizes = [generator.choice((*kinds, 1, 2, capacity // 2)) for _ in range(generator.randint(1, 60))]
        options = {"policy": "ffd", "capacity": capacity, "ranks": 1, "may_be_empty": True}
        bins = bins_of(np.array(sizes), **options)
        assert [bins[number].tolist() for number in range(len(bins))] == bins_loops.bins_of(sizes, **options)


def test_a_rank_takes_no_more_units_than_its_share_of_micro_batches_holds():
    """Rows of three hold one unit of two: four units over two ranks are two each, however costly the first is."""
    lengths = lengths_of([100, 100, 1, 1, 1, 1, 1, 1], units=[0, 0, 1, 1, 2, 2, 3, 3])
    (mini_batch,) = PaddedCollator().plan(lengths, Layout(dp=2, micro_batch_rows=3)).mini_batches
    assert [[part.samples.tolist() for part in rank] for rank in mini_batch.ranks] == [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]


def test_a_rank_may_take_more_than_its_share_where_that_fills_its_last_micro_batch():
    """Six samples over two ranks are three each, but rows of two make that two micro-batches, which hold four."""
    (mini_batch,) = PaddedCollator().plan(lengths_of([10, 1, 1, 1, 1, 1]), Layout(dp=2, micro_batch_rows=2)).mini_batches
    assert [[part.samples.tolist() for part in rank] for rank in mini_batch.ranks] == [[[0, 5], []], [[1, 2], [3, 4]]]


def test_a_unit_of_too_many_rows_is_named_although_one_before_it_fills_a_micro_batch():
    lengths = lengths_of([1] * 5, units=[0, 0, 1, 1, 1], ids=[5, 6, 7, 8, 9])
    with pytest.raises(DataError, match=r"^samples \[7, 8, 9\] of unit 1 stay together in 3 rows where a micro-batch holds 2\."):
        PaddedCollator().plan(lengths, Layout(micro_batch_rows=2))


@pytest.mark.parametrize(
    ("tokens", "units", "cause"),
    [
        ([4, 9], [0, 1], "sample 6 takes 9 tokens where a micro-batch holds 8"),
        ([8, 9], [0, 1], "sample 6 takes 9 tokens where a micro-batch holds 8"),
        ([4, 5], [3, 3], "samples [5, 6] of unit 3 take 10 tokens, padding included, where a micro-batch holds 8"),
    ],
)
def test_what_exceeds_the_budget_is_told_to_the_letter(tokens, units, cause):
    with pytest.raises(DataError) as caught:
        PaddedCollator().plan(lengths_of(tokens, units=units, ids=[5, 6]), Layout(micro_batch_tokens=8))
    assert caught.value.cause == cause


def test_plans_carry_their_layout():
    layout = Layout(dp=2, micro_batch_tokens=8)
    for collator in (PaddedCollator(), PackedCollator()):
        assert collator.plan(lengths_of([3, 2]), layout).layout == layout


def test_padded_rows_of_two_samples_are_a_mistake_of_the_caller():
    columns = SampleColumns.from_lists(input_ids=[[1], [2]])
    with pytest.raises(AssertionError, match=r"^a padded row holds one sample; this plan was made for another layout"):
        PaddedCollator().build(columns, MicroBatchPlan(np.arange(2), np.array([0, 2]), 2, 1))


def test_more_items_than_the_ranks_may_take_are_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match=r"^more items than the ranks may take"):
        balance(np.ones(5, dtype=np.int64), 2, most=2)
    assert balance(np.ones(4, dtype=np.int64), 2, most=2).tolist() == [0, 1, 0, 1]


def test_joined_rows_have_one_slot_less_than_columns():
    lengths, layout = lengths_of([3, 2]), Layout(micro_batch_tokens=4)
    plan = PackedCollator().plan(lengths, layout)
    rows = (*plan.micro_batches, plan.joined)
    assert [(row.width, row.action_width) for row in rows] == [(3, 2), (2, 1), (3, 2)]


def test_consecutive_samples_are_read_without_a_copy():
    values, offsets = np.arange(6), np.array([0, 1, 3, 3, 6])
    for samples in ([1, 2, 3], [3], [0, 1]):
        assert np.shares_memory(_concatenate_values(values, offsets, np.array(samples)), values)
    for samples in ([2, 0], [0, 2], [3, 1], [1, 1], []):
        read_values = _concatenate_values(values, offsets, np.array(samples, dtype=np.int64))
        assert read_values.tolist() == [
            value for sample in samples for value in values[offsets[sample] : offsets[sample + 1]].tolist()
        ]


def test_donors_of_equal_size_give_from_the_last_bin_on(on_numpy):
    """Some hundred bins of one to four items, which for 50 ranks are too few: donors are the fullest, the last of them first."""
    generator = random.Random(0)
    sizes = [generator.choice((2, 3, 4, 8)) for _ in range(330)]
    options = {"policy": "concat", "capacity": 8, "ranks": 50, "may_be_empty": False}
    bins = bins_of(np.array(sizes), **options)
    expected = bins_loops.bins_of(sizes, **options)
    assert len(bins_loops.fill_in_order(sizes, 8)) < len(expected)
    assert [bins[number].tolist() for number in range(len(bins))] == expected


def test_bins_stay_as_they_are_where_even_ones_would_be_too_full():
    """3 + 3 and 2 + 2 + 2 fill two bins of 6; the largest first into the emptier one would make 3 + 2 + 2."""
    options = {"policy": "balanced", "capacity": 6, "ranks": 1, "may_be_empty": True}
    bins = bins_of(np.array([2, 2, 2, 3, 3]), **options)
    assert [bins[number].tolist() for number in range(len(bins))] == [[4, 3], [2, 1, 0]]


def test_even_bins_may_be_just_full():
    """First fit puts items 2 and 1 together; the largest first into the emptier bin puts 2 and 0 there, and both bins hold their 8."""
    options = {"policy": "balanced", "capacity": 8, "ranks": 1, "may_be_empty": True}
    bins = bins_of(np.array([4, 4, 4, 2, 2]), **options)
    assert [bins[number].tolist() for number in range(len(bins))] == [[2, 0], [1, 4, 3]]


def test_no_items_fill_no_bins(on_numpy):
    assert len(first_fit_decreasing(np.zeros(0, dtype=np.int64), 8)) == 0


def test_lists_are_read_by_the_compiled_kernels_where_there_are_any(monkeypatch):
    for engine in ("numpy", "native"):
        if engine == "native" and choice._kernels_for("") is None:
            pytest.skip("no compiled kernels")
        monkeypatch.setenv(choice.VARIABLE, engine)
        assert (choice.read_lists([[1, 2], [3]], np.int32) is not None) == (engine == "native")


def test_counting_rows_is_refused_for_packed_rows():
    with pytest.raises(
        UnsupportedError, match=r"^packed rows are filled by tokens and a micro-batch is one row, so micro_batch_rows says"
    ):
        PackedCollator().plan(lengths_of([1]), Layout(micro_batch_rows=4))


def test_a_unit_that_fits_nowhere_names_its_first_five_samples():
    ids = [20, 21, 22, 23, 24, 25, 26]
    lengths = lengths_of([9, 2, 2, 2, 2, 2, 2], units=[0, 5, 5, 5, 5, 5, 5], ids=ids)
    for collator in (PaddedCollator(), PackedCollator()):
        with pytest.raises(DataError, match=r"^samples \[21, 22, 23, 24, 25\] of unit 5 take 12 tokens") as caught:
            collator.plan(lengths, Layout(micro_batch_tokens=11))
        check_says_what_to_do(caught.value)


def test_a_packed_row_that_became_longer_names_its_first_five_samples():
    """The row before it is just full."""
    columns = SampleColumns.from_lists(input_ids=[[1] * 6, *[[1]] * 7], sample_ids=np.arange(10, 18))
    plan = MicroBatchPlan(np.arange(8), np.array([0, 1, 8]), 6, 5)
    with pytest.raises(
        DataError, match=r"^samples \[11, 12, 13, 14, 15\] occupy 7 tokens of a packed row, the plan's rows hold 6\."
    ):
        PackedCollator().build(columns, plan)


def test_exactly_five_overlong_samples_are_all_of_them(caplog):
    lengths = lengths_of([3] * 5 + [2], ids=[10, 11, 12, 13, 14, 15])
    named = ", ".join(f"{sample} (3 tokens)" for sample in range(10, 15))
    expected = f"5 of 6 samples are longer than max_sequence_length = 2: {named}"
    with pytest.raises(DataError) as caught:
        check_maximum_length(lengths, 2, "error")
    assert caught.value.cause == expected
    check_says_what_to_do(caught.value)
    with caplog.at_level(logging.WARNING):
        check_maximum_length(lengths, 2, "warn")
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_six_overlong_samples_are_five_and_one_more():
    with pytest.raises(DataError) as caught:
        check_maximum_length(lengths_of([3] * 6), 2, "error")
    assert caught.value.cause.endswith("4 (3 tokens) and 1 more")


def test_what_the_compiled_kernels_refuse_says_what_to_do():
    try:
        compiled = choice.Kernels(choice.load())
    except ImportError as problem:
        pytest.skip(f"no compiled kernels ({problem})")
    with pytest.raises(DataError) as caught:
        compiled.write_rows([], starts=np.zeros(1), lengths=np.zeros(1), places=np.zeros(1))
    check_says_what_to_do(caught.value)


def test_absent_kernels_say_why_and_what_to_do(monkeypatch, caplog):
    choice._kernels_for.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "skyrl_engine_collators._kernels", None)
    try:
        with caplog.at_level(logging.WARNING):
            assert choice._kernels_for("") is None
        assert caplog.records[0].getMessage().startswith("collators run on NumPy, with the same results but slower")
        assert "import of skyrl_engine_collators._kernels halted" in caplog.text
        with pytest.raises(UnsupportedError) as caught:
            choice._kernels_for("native")
        check_says_what_to_do(caught.value)
    finally:
        choice._kernels_for.cache_clear()


def test_an_item_that_fits_into_no_bin_is_named_by_the_compiled_kernels():
    try:
        compiled = choice.Kernels(choice.load())
    except ImportError as problem:
        pytest.skip(f"no compiled kernels ({problem})")
    with pytest.raises(DataError, match=r"nothing was written: item 1 has size 9, bins have 8\.") as caught:
        compiled.first_fit(np.array([3, 9]), 8)
    check_says_what_to_do(caught.value)
