"""`packed` under the conformance kit, and over the full product of layouts and policies against its plain definition."""

from itertools import pairwise

import numpy as np
import pytest
from attrs import astuple, evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine import DataError, UnsupportedError
from skyrl_engine.contracts import Layout, SampleColumns, SampleLengths, collate
from skyrl_engine.testing import CollatorConformance
from skyrl_engine.testing.collators import strategies
from skyrl_engine.testing.collators.cases import require_same_field
from skyrl_engine.testing.collators.plan_promises import PLAN_PROMISES
from skyrl_engine_collators.packed import bins_loops, loops
from skyrl_engine_collators.packed.collator import PackedCollator

PAD = 151_643
pytestmark = pytest.mark.usefixtures("engine")
POLICIES = ("ffd", "balanced", "concat")


class PackedConformance(CollatorConformance):
    def collator(self):
        return PackedCollator(PAD)

    def reference(self, columns, micro_batch):
        return loops.build_fields(columns, micro_batch, PAD)

    def layouts(self, lengths):
        """Packed rows are cut by tokens alone."""
        return strategies.layouts(lengths).map(lambda layout: evolve(layout, micro_batch_rows=None))


class TestPackedFirstFit(PackedConformance):
    pass


class PlansConformance(PackedConformance):
    """Promises about plans alone, for options that change nothing else: rows are built as above, and the nightly tests build them."""

    promises = PLAN_PROMISES


class Balanced(PackedConformance):
    def collator(self):
        return PackedCollator(PAD, policy="balanced")


class Concat(PackedConformance):
    def collator(self):
        return PackedCollator(PAD, policy="concat")


class OwnCapacity(PackedConformance):
    """The collator's own limit holds where the layout has none: seven samples of twelve tokens fill a row."""

    def collator(self):
        return PackedCollator(PAD, max_tokens_per_microbatch=7 * 12)

    def layouts(self, lengths):
        return strategies.layouts(lengths, parallel=False).map(lambda layout: evolve(layout, micro_batch_rows=None))


class TrueLengths(PackedConformance):
    """Without strict capacity too few samples for the ranks are an error, and alignment exceeds the budget: one unaligned rank here,
    the others in the comparison with the definition below.
    """

    def collator(self):
        return PackedCollator(PAD, strict_capacity=False)

    def layouts(self, lengths):
        return strategies.layouts(lengths, parallel=False).map(lambda layout: evolve(layout, micro_batch_rows=None, dp=1))


class TestPackedBalanced(Balanced, PlansConformance):
    pass


class TestPackedConcat(Concat, PlansConformance):
    pass


class TestPackedOwnCapacity(OwnCapacity, PlansConformance):
    pass


class TestPackedTrueLengths(TrueLengths, PlansConformance):
    pass


@pytest.mark.nightly
class TestRowsOfBalanced(Balanced):
    pass


@pytest.mark.nightly
class TestRowsOfConcat(Concat):
    pass


@pytest.mark.nightly
class TestRowsOfOwnCapacity(OwnCapacity):
    pass


@pytest.mark.nightly
class TestRowsOfTrueLengths(TrueLengths):
    pass


def plain_rows(lengths, layout, policy, capacity, strict):
    """Rank -> row -> samples by the plain definition, one mini-batch; None where it has no answer."""
    alignment = layout.tp if layout.cp == 1 else 2 * layout.tp * layout.cp
    units = {}
    for sample, unit in enumerate(lengths.unit_ids.tolist()):
        units.setdefault(unit, []).append(sample)
    tokens = lengths.tokens.tolist()
    occupied = [-(-count // alignment) * alignment for count in tokens]
    counted = occupied if strict else tokens
    sizes = [int(sum(counted[sample] for sample in members)) for members in units.values()]
    if capacity is not None and max(sizes) > capacity:
        return None
    bins = bins_loops.bins_of(sizes, policy=policy, capacity=capacity, ranks=layout.dp, may_be_empty=strict)
    if bins is None:
        return None
    members = list(units.values())
    rows = [[sample for unit in part for sample in members[unit]] for part in bins]
    widths = [max(alignment, sum(occupied[sample] for sample in row)) for row in rows]
    return [[(rows[k], int(widths[k])) for k in range(rank, len(rows), layout.dp)] for rank in range(layout.dp)]


@st.composite
def parallel_layouts(draw):
    return Layout(
        dp=draw(st.integers(1, 4)),
        tp=draw(st.sampled_from((1, 2, 3, 4))),
        cp=draw(st.sampled_from((1, 2, 4))),
        pp=draw(st.sampled_from((1, 2))),
    )


@given(
    strategies.sample_columns(max_samples=9, carries=("router_replay", "vision"), wide=True),
    parallel_layouts(),
    st.sampled_from(POLICIES),
    st.booleans(),
    st.none() | st.integers(1, 40) | st.integers(40, 400),
    st.booleans(),
)
def test_plans_and_builds_equal_the_definition_for_every_layout_and_policy(columns, layout, policy, strict, capacity, of_the_run):
    lengths = columns.lengths
    own, run = (None, capacity) if of_the_run else (capacity, None)
    collator = PackedCollator(PAD, policy=policy, strict_capacity=strict, max_tokens_per_microbatch=own)
    layout = evolve(layout, micro_batch_tokens=run)
    expected = plain_rows(lengths, layout, policy, capacity, strict)
    if expected is None:
        with pytest.raises((DataError, UnsupportedError)):
            collator.plan(lengths, layout)
        return
    plan = collator.plan(lengths, layout)
    (mini_batch,) = plan.mini_batches
    rows = [[(row.samples.tolist(), row.width) for row in rank] for rank in mini_batch.ranks]
    widest = max(width for rank in expected for _, width in rank)
    assert rows == expected
    assert all(row.rows == 1 and row.action_width == row.width - 1 for row in plan.micro_batches)
    if strict and capacity is not None:
        assert widest <= capacity

    for micro_batch in [*plan.micro_batches, plan.joined]:
        assert_equals_reference(collator.build(columns, micro_batch), columns, micro_batch)

    whole = collate(collator, columns, layout)
    assert whole["input_ids"].shape[1] == widest
    parts = [collator.build(columns, evolve(row, width=widest, action_width=widest - 1)) for row in plan.micro_batches]
    for name, tensor in whole.fields.items():
        require_same_field(name, tensor.numpy(), np.concatenate([part[name].numpy() for part in parts]))
    assert [offsets.tolist() for offsets in whole.cu_seqlens] == [part.cu_seqlens[0].tolist() for part in parts]


def assert_equals_reference(batch, columns, micro_batch):
    expected = loops.build_fields(columns, micro_batch, PAD)
    assert list(batch.fields) == list(expected)
    for name, array in expected.items():
        assert batch[name].is_contiguous()
        require_same_field(name, batch[name].numpy(), array)
    gather = batch.gather
    entries = zip(gather.actions.tolist(), gather.rows.tolist(), gather.columns.tolist(), strict=True)
    assert list(entries) == loops.gather_index(columns, micro_batch)
    assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in (gather.actions, gather.rows, gather.columns))
    assert [offsets.tolist() for offsets in batch.cu_seqlens] == loops.cu_seqlens(columns, micro_batch)
    assert all(offsets.dtype == np.int32 and offsets.flags.c_contiguous for offsets in batch.cu_seqlens)
    offsets = micro_batch.row_offsets.tolist()
    tokens = np.diff(columns.token_offsets)
    assert [lengths.tolist() for lengths in batch.sequence_lengths] == [
        tokens[micro_batch.samples[start:stop]].tolist() for start, stop in pairwise(offsets)
    ]


@settings(deadline=None)
@given(st.data())
def test_mini_batches_are_cut_as_for_padded_and_packed_each_on_its_own(data):
    lengths = data.draw(strategies.sample_lengths(max_samples=9))
    size = strategies.largest_bundle(lengths, groups=True) + data.draw(st.integers(0, 3))
    layout = evolve(data.draw(strategies.layouts(lengths)), micro_batch_rows=None, mini_batch_size=size)
    for policy in POLICIES:
        plan = PackedCollator(PAD, policy=policy).plan(lengths, layout)
        for mini_batch in plan.mini_batches:
            samples = np.sort(mini_batch.samples)
            part = SampleLengths(*(array[samples] for array in astuple(lengths, recurse=False)[:-1]))
            expected = plain_rows(part, layout, policy, layout.micro_batch_tokens, True)
            planned = [[row.samples.tolist() for row in rank] for rank in mini_batch.ranks]
            assert planned == [[samples[row].tolist() for row, _ in rank] for rank in expected]


def test_a_batch_without_samples():
    batch = collate(PackedCollator(PAD), SampleColumns.from_lists(input_ids=[]), Layout(tp=4, dp=2))
    assert tuple(batch["input_ids"].shape) == (0, 1)
    assert tuple(batch["loss_weight"].shape) == (0, 0)
    assert len(batch.sequence_lengths) == len(batch.cu_seqlens) == 0
    assert len(batch.gather.actions) == 0
