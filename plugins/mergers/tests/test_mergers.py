"""Both mergers: merge(split(x)) == x for every layout, the errors, and known defects of other engines that must be impossible here."""

from collections.abc import Sequence

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from skyrl_engine import OutputError
from skyrl_engine.contracts import (
    PADDING_SAMPLE,
    BatchOutput,
    BatchPlan,
    Layout,
    Merger,
    Metric,
    MicroBatchPlan,
    MiniBatchPlan,
    Ragged,
    RankCoords,
    RankOutput,
    Topology,
    offsets_of,
    one_sample_per_row,
)
from skyrl_engine_mergers.listed import ListMerger
from skyrl_engine_mergers.ordered import OrderedMerger
from skyrl_engine_mergers.plugin import ListConfig, listed, ordered

mergers = pytest.mark.parametrize(
    "merger", [OrderedMerger(), ListMerger(), ListMerger(fill=0.0)], ids=["ordered", "list", "list, filled"]
)


@frozen(eq=False)
class Case:
    """A whole batch's output, the plan that cuts it, the world it is cut over, and a seed for what neither decides."""

    whole: BatchOutput
    plan: BatchPlan
    topology: Topology
    seed: int


def whole_output(generator: np.random.Generator, count: int, *, per_token_outputs: bool = True, apart: int = 1) -> BatchOutput:
    """Random outputs of `count` samples; values are integers, so that sums are exact in every order. Ids are multiples of `apart`."""
    actions = generator.integers(0, 6, count)
    kept = [np.flatnonzero(generator.random(length) < 0.7) for length in actions] if per_token_outputs else [[]] * count
    scored = Ragged.from_list(kept, np.int32)
    fields = {
        name: Ragged(generator.integers(-9, 9, len(scored.values)).astype(np.float32), scored.offsets)
        for name in ("logprobs", "entropy")
        if per_token_outputs
    }
    ids = generator.permutation(count * 3)[:count].astype(np.int64) * apart
    return BatchOutput(ids, actions, scored, fields, metrics_of(ids))


def metrics_of(ids: Sequence[int]) -> dict[str, Metric]:
    """One metric per reduction, from the sample ids alone."""
    if not len(ids):
        return {}
    return {
        "total": Metric.sum(sum(ids)),
        "average": Metric.mean(sum(ids), len(ids)),
        "least": Metric.min(min(ids)),
        "most": Metric.max(max(ids)),
    }


def padding(actions: int, *, per_token_outputs: bool = True) -> RankOutput:
    """A padding sample with outputs of its own, which must not survive."""
    count = actions if per_token_outputs else 0
    scored = Ragged(np.arange(count, dtype=np.int32), offsets_of([count]))
    fields = {name: Ragged(np.full(count, 99, np.float32), scored.offsets) for name in ("logprobs", "entropy") if per_token_outputs}
    return RankOutput(np.array([PADDING_SAMPLE]), np.array([actions]), scored, fields)


def split(case: Case) -> list[RankOutput]:
    """Outputs of the ranks of this world, mini-batch by mini-batch: replicas, empty stages and padding samples included."""
    generator = np.random.default_rng(case.seed)
    whole = RankOutput(case.whole.sample_ids, case.whole.action_lengths, case.whole.scored, case.whole.fields)
    outputs = []
    for mini_batch in case.plan.mini_batches:
        for coords in map(case.topology.coords, range(case.topology.world_size)):
            parts = []
            for micro_batch in mini_batch.ranks[coords.dp]:
                part = whole.take(micro_batch.samples)
                parts.append(evolve(part, metrics=metrics_of(part.sample_ids.tolist())))
                if generator.random() < 0.5:
                    parts.append(padding(int(generator.integers(0, 3)), per_token_outputs=bool(whole.fields)))
            whole_rank = RankOutput.concat(parts, coords)
            outputs.append(whole_rank if coords.last_stage else RankOutput.empty(coords))
    return [outputs[place] for place in generator.permutation(len(outputs))]


def plan_of(ids: np.ndarray, mini_batches: list[list[list[list[int]]]]) -> BatchPlan:
    """A plan from nested lists: mini-batch -> data-parallel rank -> micro-batch -> samples, one sample per row."""
    return BatchPlan(
        tuple(
            MiniBatchPlan(tuple(tuple(micro_batch(samples) for samples in rank) for rank in mini_batch))
            for mini_batch in mini_batches
        ),
        Layout(dp=max(len(mini_batch) for mini_batch in mini_batches)),
        ids,
    )


def micro_batch(samples: list[int]) -> MicroBatchPlan:
    return one_sample_per_row(np.array(samples, dtype=np.int64), 8, 8)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    topology = Topology(
        dp=draw(st.integers(1, 4)), tp=draw(st.integers(1, 2)), cp=draw(st.integers(1, 2)), pp=draw(st.integers(1, 2))
    )
    count, seed = draw(st.integers(1, 14)), draw(st.integers(0, 2**31))
    generator = np.random.default_rng(seed)
    whole = whole_output(generator, count, per_token_outputs=draw(st.booleans()), apart=draw(st.sampled_from((1, 1 << 40))))
    mini_batches = []
    for chosen in np.array_split(generator.permutation(count), draw(st.integers(1, 3))):
        ranks = np.array_split(chosen, topology.dp)
        cuts = draw(st.integers(1, 3))
        mini_batches.append([[part.tolist() for part in np.array_split(rank, cuts)] for rank in ranks])
    return Case(whole, plan_of(whole.sample_ids, mini_batches), topology, seed)


def assert_equal(merged: BatchOutput, whole: BatchOutput) -> None:
    assert_same_array(merged.sample_ids, whole.sample_ids)
    assert_same_array(merged.action_lengths, whole.action_lengths)
    assert_same_ragged(merged.scored, whole.scored)
    assert merged.fields.keys() == whole.fields.keys()
    for name, ragged in whole.fields.items():
        assert_same_ragged(merged.fields[name], ragged)
    assert merged.metrics == whole.metrics


def assert_same_ragged(got: Ragged, wanted: Ragged) -> None:
    assert_same_array(got.values, wanted.values)
    assert_same_array(got.offsets, wanted.offsets)


def assert_same_array(got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted, strict=True)


@mergers
@given(cases())
def test_merge_undoes_split(merger: Merger, case: Case) -> None:
    """Over dp, tp, cp, pp, mini-batches, micro-batch cuts, padding samples, order of arrival, with and without per-token outputs.

    Values are small integers in float32, so metrics are exact too. Packing is not a case of its own: outputs carry no rows.
    """
    outputs = split(case)
    assert_equal(merger.merge(outputs, case.plan), case.whole)


@mergers
@given(cases(), st.data())
def test_a_lost_sample_is_named(merger: Merger, case: Case, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(case.whole.sample_ids.tolist()))
    outputs = [output.take(np.flatnonzero(output.sample_ids != lost)) for output in split(case)]
    with pytest.raises(OutputError, match=rf"missing: sample {lost}, planned on data-parallel rank \d") as caught:
        merger.merge(outputs, case.plan)
    assert "1 missing, 0 duplicated, 0 unexpected" in caught.value.cause
    due = "Check that the backend returns each of its rank's samples exactly once, under the id it was given"
    assert isinstance(merger, ListMerger) or caught.value.remedy == due


@mergers
def test_padding_added_inside_each_mini_batch_is_dropped(merger: Merger) -> None:
    """With dp 4 and mini-batches [0, 5) and [5, 11), each filled up to a multiple of 4: ids come back as 0..10 exactly once."""
    whole = evolve(whole_output(np.random.default_rng(0), 11), sample_ids=np.arange(11), metrics={})
    plan = plan_of(
        whole.sample_ids, [[[[0, 1]], [[2]], [[3]], [[4]]], [[[5, 6]], [[7, 8]], [[9]], [[10]]]]
    )  # the last ranks get one sample and one padding sample
    ranks = RankOutput(whole.sample_ids, whole.action_lengths, whole.scored, whole.fields)
    outputs = [
        RankOutput.concat([ranks.take(mini_batch.rank_samples(dp)), padding(2)], RankCoords(rank=dp, dp=dp))
        for mini_batch in plan.mini_batches
        for dp in range(4)
    ]
    merged = merger.merge(outputs, plan)
    assert merged.sample_ids.tolist() == list(range(11))
    assert_equal(merged, whole)


@mergers
def test_token_budget_order_is_undone(merger: Merger) -> None:
    """Micro-batches cut by a token budget hold samples by length, and dummy rows fill the last one; one rank, caller's order back."""
    whole = whole_output(np.random.default_rng(1), 9)
    by_length = np.argsort(-whole.action_lengths, kind="stable").tolist()
    plan = plan_of(whole.sample_ids, [[[by_length[:2], by_length[2:6], by_length[6:]]]])
    outputs = split(Case(whole, plan, Topology(), 3))
    assert outputs[0].sample_ids.tolist() != whole.sample_ids.tolist()
    assert_equal(merger.merge(outputs, plan), whole)


@mergers
@pytest.mark.parametrize("staged", [False, True])
def test_every_rank_s_samples_come_back_once_among_replicas(merger: Merger, staged: bool) -> None:
    """A world of dp 3, tp 2, cp 2, pp 2: 24 ranks, of which 3 collect. Outputs of ranks >= 1 are kept, those of replicas are not.

    Staged: all mini-batches' outputs in one merge; unstaged: one merge for each, over the same plan.
    """
    whole = evolve(whole_output(np.random.default_rng(4), 7), metrics={})
    plan = plan_of(whole.sample_ids, [[[[0], [3]], [[1], []], [[2], []]], [[[6]], [[4]], [[5]]]])
    columns = RankOutput(whole.sample_ids, whole.action_lengths, whole.scored, whole.fields)
    topology = Topology(dp=3, tp=2, cp=2, pp=2)

    def outputs_of(part: BatchPlan) -> list[RankOutput]:
        everywhere = map(topology.coords, range(topology.world_size))
        (mini_batch,) = part.mini_batches
        return [evolve(columns.take(mini_batch.rank_samples(coords.dp)), coords=coords) for coords in everywhere]

    parts = list(plan)
    if staged:
        assert_equal(merger.merge([output for part in parts for output in outputs_of(part)], plan), whole)
    for part, samples in zip(parts, ([0, 1, 2, 3], [4, 5, 6]), strict=True):
        merged = merger.merge(outputs_of(part), part)
        wanted = columns.take(samples)
        assert_equal(merged, BatchOutput(wanted.sample_ids, wanted.action_lengths, wanted.scored, wanted.fields))


@mergers
def test_one_rank_in_order_is_handed_on_without_a_copy(merger: Merger) -> None:
    whole = whole_output(np.random.default_rng(2), 5)
    plan = plan_of(whole.sample_ids, [[[[0, 1, 2], [3, 4]]]])
    output = RankOutput(whole.sample_ids, whole.action_lengths, whole.scored, whole.fields, whole.metrics)
    merged = merger.merge([output], plan)
    assert merged.fields is output.fields
    assert merged.scored is output.scored
    assert merged.metrics is output.metrics


def two_ranks(first: list[int], second: list[int]) -> list[RankOutput]:
    return [
        RankOutput(
            np.array(ids), np.zeros(len(ids), np.int64), Ragged(np.zeros(0, np.int32), offsets_of([0] * len(ids))), coords=coords
        )
        for ids, coords in ((first, RankCoords(rank=0)), (second, RankCoords(rank=2, dp=1)))
    ]


@mergers
@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ([7, 8], [7, 9], "duplicated: sample 7, returned by rank 0, 2"),
        ([7, 8, 8], [9], "duplicated: sample 8, returned by rank 0, 0"),
        ([7, 8], [9, 5], "unexpected: sample 5, returned by rank 2"),
        ([7, 5], [9], "missing: sample 8, planned on data-parallel rank 0"),
        ([7, 5], [9], "unexpected: sample 5, returned by rank 0"),
        ([7, 1 << 60], [9], f"unexpected: sample {1 << 60}, returned by rank 0"),
        ([7, 7], [9 - (1 << 60)], f"unexpected: sample {9 - (1 << 60)}, returned by rank 2"),
        ([], [], "missing: sample 9, planned on data-parallel rank 1"),
    ],
)
def test_what_does_not_fit_is_listed_with_its_ranks(merger: Merger, first: list[int], second: list[int], line: str) -> None:
    plan = plan_of(np.array([9, 7, 8]), [[[[1, 2]], [[0]]]])
    with pytest.raises(OutputError) as caught:
        merger.merge(two_ranks(first, second), plan)
    assert line in caught.value.details


@mergers
def test_long_lists_are_cut(merger: Merger) -> None:
    plan = plan_of(np.arange(25), [[[list(range(13))], [list(range(13, 25))]]])
    with pytest.raises(OutputError) as caught:
        merger.merge(two_ranks(list(range(13)), []), plan)
    assert len(caught.value.details) == 11
    assert caught.value.details[-1] == "missing: and 2 more"
    with pytest.raises(OutputError) as caught:
        merger.merge(two_ranks(list(range(13)), list(range(13, 15))), plan)
    assert [line for line in caught.value.details if "more" in line] == [], "ten are listed whole"


@mergers
def test_ranks_with_different_fields_are_refused(merger: Merger) -> None:
    plan = plan_of(np.array([0, 1]), [[[[0]], [[1]]]])
    first, second = two_ranks([0], [1])
    second = evolve(second, fields={"entropy": Ragged(np.zeros(0, np.float32), offsets_of([0]))})
    with pytest.raises(OutputError, match=r"rank 2 returned the fields \['entropy'\] and rank 0 \[\]"):
        merger.merge([first, second], plan)


@mergers
def test_fields_of_every_rank_are_compared(merger: Merger) -> None:
    ids = np.arange(3)
    plan = plan_of(ids, [[[[0]], [[1]], [[2]]]])
    outputs = []
    for dp, name in enumerate(("logprobs", "logprobs", "entropy")):
        scored = Ragged(np.zeros(1, np.int32), offsets_of([1]))
        fields = {name: Ragged(np.zeros(1, np.float32), scored.offsets)}
        outputs.append(
            RankOutput.concat([RankOutput(ids[dp : dp + 1], np.ones(1, np.int64), scored, fields)], Topology(dp=3).coords(dp))
        )
    with pytest.raises(OutputError, match=r"rank 2 returned the fields \['entropy'\] and rank 0 \['logprobs'\]") as caught:
        merger.merge(outputs, plan)
    assert caught.value.remedy == "Let every rank return the same per-token outputs"


@mergers
def test_metrics_are_added_up_in_the_order_of_ranks(merger: Merger) -> None:
    """The order in which these are added up decides their sum in float64."""
    ids = np.arange(3)
    plan = plan_of(ids, [[[[0]], [[1]], [[2]]]])
    outputs = []
    for dp, value in enumerate((1e16, 1.0, -1e16)):
        part = RankOutput(ids[dp : dp + 1], np.zeros(1, np.int64), Ragged(np.zeros(0, np.int32), offsets_of([0])), {})
        part = evolve(part, metrics={"total": Metric.sum(value)})
        outputs.append(RankOutput.concat([part], Topology(dp=3).coords(dp)))
    due = merger.merge(outputs, plan).metrics["total"].result
    for order in ((0, 2, 1), (2, 1, 0), (1, 0, 2)):
        assert merger.merge([outputs[place] for place in order], plan).metrics["total"].result == due


@mergers
def test_metrics_of_replicas_are_not_counted_twice(merger: Merger) -> None:
    plan = plan_of(np.array([0]), [[[[0]]]])
    (kept, _) = two_ranks([0], [])
    kept = evolve(kept, metrics={"loss": Metric.sum(3)})
    outputs = [kept, evolve(kept, coords=RankCoords(rank=1, tp=1)), evolve(kept, coords=RankCoords(rank=2, cp=1))]
    assert merger.merge(outputs, plan).metrics == {"loss": Metric.sum(3)}


def test_the_plugins_make_their_mergers() -> None:
    assert isinstance(ordered.skyrl_engine_make_merger(), OrderedMerger)
    assert listed.skyrl_engine_config_schema() is ListConfig
    assert listed.skyrl_engine_make_merger(ListConfig(fill=2.0)) == ListMerger(2.0)
