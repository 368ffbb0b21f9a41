"""`padded` under the conformance kit, and each of its entries against the loop that starts from Python lists."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts import Layout, SampleColumns, collate
from skyrl_engine.testing import CollatorConformance
from skyrl_engine.testing.collators import strategies
from skyrl_engine.testing.collators.cases import require_same_field
from skyrl_engine.testing.collators.strategies import SampleLists, sample_lists
from skyrl_engine_collators.kernels import read_lists
from skyrl_engine_collators.padded import loops
from skyrl_engine_collators.padded.collator import PaddedCollator

PAD = 151_643
pytestmark = pytest.mark.usefixtures("engine")


class TestPaddedConformance(CollatorConformance):
    def collator(self):
        return PaddedCollator(pad_token_id=PAD)

    def reference(self, columns, micro_batch):
        return loops.build_fields(columns, micro_batch, PAD)


def assert_same(batch, expected):
    assert list(batch.fields) == list(expected)
    for name, array in expected.items():
        tensor = batch[name]
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        require_same_field(name, tensor.numpy(), array)


@settings(deadline=None)
@given(sample_lists(carries=["router_replay"], wide=True))
def test_the_supervised_entry_equals_its_reference_loop(lists: SampleLists):
    arguments = {
        "input_ids": [[*prompt, *response] for prompt, response in zip(lists.prompts, lists.responses, strict=True)],
        "num_actions": [len(response) for response in lists.responses],
        "loss_mask": lists.loss_masks,
        "columns": lists.columns,
        "routes": lists.extras.get("expert_routes"),
    }
    batch = collate(PaddedCollator(PAD), SampleColumns.from_lists(**arguments, reader=read_lists))
    assert_same(batch, loops.from_lists(**arguments, pad_token_id=PAD))


@settings(deadline=None)
@given(sample_lists(carries=["router_replay"], wide=True), st.sampled_from((np.asarray, np.ndarray.tolist, torch.from_numpy)))
def test_the_reinforcement_learning_entry_equals_its_reference_loop(lists: SampleLists, convert):
    """Routes may be NumPy arrays, nested lists or tensors."""
    named = dict(lists.columns)
    rewards, logprobs = named.pop("rewards", None), named.pop("rollout_logprobs", None)
    routes = lists.extras.get("expert_routes")
    columns = SampleColumns.from_rollouts(
        reader=read_lists,
        routes=None if routes is None else [convert(route) for route in routes],
        prompts=lists.prompts,
        responses=lists.responses,
        rewards=rewards,
        logprobs=logprobs,
        loss_masks=lists.loss_masks,
        columns=named,
    )
    present = {"rewards": rewards, "rollout_logprobs": logprobs, **named}
    expected = loops.from_rollouts(
        prompts=lists.prompts,
        responses=lists.responses,
        loss_masks=lists.loss_masks,
        columns={name: rows for name, rows in present.items() if rows is not None},
        pad_token_id=PAD,
        routes=routes,
    )
    assert_same(collate(PaddedCollator(PAD), columns), expected)


@given(strategies.sample_columns(wide=True), st.data())
def test_columns_of_several_numbers_per_token_equal_the_definition(columns: SampleColumns, data):
    """Compiled and in NumPy, for every layout, and for some of the fields."""
    collator = PaddedCollator(PAD)
    for micro_batch in collator.plan(columns.lengths, data.draw(strategies.layouts(columns.lengths))).micro_batches:
        expected = loops.build_fields(columns, micro_batch, PAD)
        assert_same(collator.build(columns, micro_batch), expected)
        wanted = ["top_ids", "input_ids"]
        assert_same(
            collator.build(columns, micro_batch, fields=wanted), {name: expected[name] for name in expected if name in wanted}
        )


@settings(deadline=None, max_examples=30)
@given(sample_lists())
def test_the_gather_index_equals_its_reference_loop(lists: SampleLists):
    columns = lists.to_columns()
    (mini_batch,) = PaddedCollator(PAD).plan(columns.lengths, Layout()).mini_batches
    (micro_batch,) = mini_batch.ranks[0]
    gather = PaddedCollator(PAD).build(columns, micro_batch).gather
    entries = zip(gather.actions.tolist(), gather.rows.tolist(), gather.columns.tolist(), strict=True)
    assert list(entries) == loops.gather_index(columns, micro_batch)


@pytest.mark.parametrize("entry", ["from_lists", "from_rollouts"])
def test_a_batch_without_samples(entry):
    empty = {"from_lists": {"input_ids": []}, "from_rollouts": {"prompts": [], "responses": []}}[entry]
    batch = collate(PaddedCollator(PAD), getattr(SampleColumns, entry)(**empty))
    assert tuple(batch["input_ids"].shape) == (0, 1)
    assert tuple(batch["loss_weight"].shape) == (0, 0)
    assert len(batch.sequence_lengths) == 0
    assert len(batch.gather.actions) == 0
