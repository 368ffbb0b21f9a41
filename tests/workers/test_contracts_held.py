"""Collators and mergers are held to their contracts in every step: what they lose cannot go unnoticed."""

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.outputs import Metric, RankOutput
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.errors import ContractError, PluginBrokenError
from skyrl_engine.spans import Spans
from skyrl_engine.testing.subject import part_of
from skyrl_engine.workers.batch import ShardBatch
from skyrl_engine.workers.dispatch import cut, merge_outputs, plan_batch
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_mergers.ordered import OrderedMerger

LABEL = "collator 'mine' of acme 1.0"


@pytest.fixture
def columns() -> SampleColumns:
    return SampleColumns.create(
        input_ids=np.arange(12),
        token_offsets=offsets_of([4, 4, 4]),
        action_offsets=offsets_of([2, 3, 2]),
        sample_ids=np.array([5, 6, 7]),
    )


class Forgetful(PaddedCollator):
    def plan(self, lengths, layout):
        return super().plan(evolve(lengths, **{name: getattr(lengths, name)[:2] for name in FIELDS}), layout)


class Eager(PaddedCollator):
    def plan(self, lengths, layout):
        return super().plan(lengths, evolve(layout, mini_batch_size=1))


class Lopsided(PaddedCollator):
    def plan(self, lengths, layout):
        plan = super().plan(lengths, layout)
        (mini_batch,) = plan.mini_batches
        return evolve(plan, mini_batches=(evolve(mini_batch, ranks=(mini_batch.ranks[0] * 2, *mini_batch.ranks[1:])),))


class Silent(PaddedCollator):
    def plan(self, lengths, layout):
        return None


class Failing(PaddedCollator):
    def plan(self, lengths, layout):
        raise KeyError("width")


class Shortsighted(PaddedCollator):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        gather = batch.gather
        return evolve(batch, gather=evolve(gather, actions=gather.actions[1:], rows=gather.rows[1:], columns=gather.columns[1:]))


FIELDS = ("tokens", "actions", "sample_ids", "group_ids", "unit_ids")


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (Forgetful, ContractError, "planned 2 samples where there are 3, 1 of them not at all"),
        (Eager, ContractError, "planned 3 mini-batches where one was asked for"),
        (Lopsided, ContractError, r"planned \[2, 1\] micro-batches for 2 ranks"),
        (Silent, ContractError, "returned None from plan. Return a BatchPlan"),
        (Failing, PluginBrokenError, "failed in plan: KeyError"),
    ],
)
def test_a_wrong_plan_is_refused_and_its_collator_named(columns, wrong, error, message):
    with pytest.raises(error, match=message) as caught:
        plan_batch(part_of(wrong(), LABEL, "collator"), columns, Layout(dp=2))
    assert LABEL in caught.value.cause


@pytest.mark.parametrize("selection", ["loss", "actions"])
def test_a_gather_index_that_forgets_a_token_is_refused(columns, selection):
    plan = plan_batch(part_of(PaddedCollator(), LABEL, "collator"), columns, Layout())
    (shard,) = cut(columns, plan.mini_batches[0], np.ones(7), ())
    with pytest.raises(
        ContractError, match="where to score 6 response tokens of a micro-batch; they are not the 7 that have a predec"
    ):
        list(ShardBatch(shard, part_of(Shortsighted(), LABEL, "collator"), selection, Spans()))


class LosesTheLast(OrderedMerger):
    def merge(self, outputs, plan):
        output = super().merge(outputs, plan)
        keep = np.arange(len(output) - 1)
        return evolve(
            output, sample_ids=output.sample_ids[keep], action_lengths=output.action_lengths[keep], scored=output.scored.take(keep)
        )


class Fails(OrderedMerger):
    def merge(self, outputs, plan):
        raise ZeroDivisionError("no ranks")


class Silences(OrderedMerger):
    def merge(self, outputs, plan):
        return None


class LosesMetrics(OrderedMerger):
    def merge(self, outputs, plan):
        return evolve(super().merge(outputs, plan), metrics={})


def test_a_merger_that_loses_something_or_fails_is_named(columns):
    plan = plan_batch(part_of(PaddedCollator(), LABEL, "collator"), columns, Layout())
    whole = RankOutput(np.array([5, 6, 7]), np.array([2, 3, 2]), Ragged(np.zeros(0, np.int32), offsets_of([0, 0, 0])))
    whole = evolve(whole, metrics={"loss": Metric.sum(1.0)})
    assert merge_outputs(part_of(OrderedMerger(), "merger", "merger"), [whole], plan).sample_ids.tolist() == [5, 6, 7]
    with pytest.raises(ContractError, match="merger 'mine' returned 2 samples where 3 were planned"):
        merge_outputs(part_of(LosesTheLast(), "merger 'mine'", "merger"), [whole], plan)
    with pytest.raises(ContractError, match="merger 'mine' returned no metric 'loss'"):
        merge_outputs(part_of(LosesMetrics(), "merger 'mine'", "merger"), [whole], plan)
    with pytest.raises(ContractError, match=r"merger 'mine' returned None from merge\. Return a BatchOutput"):
        merge_outputs(part_of(Silences(), "merger 'mine'", "merger"), [whole], plan)
    with pytest.raises(PluginBrokenError, match="merger 'mine' failed in merge: ZeroDivisionError"):
        merge_outputs(part_of(Fails(), "merger 'mine'", "merger"), [whole], plan)
