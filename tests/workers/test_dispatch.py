"""What a rank is sent and builds: the right tokens, labels and weights, whatever the plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.columns import SampleColumns
from skyrl_engine.contracts.plan import Layout
from skyrl_engine.contracts.ragged import offsets_of
from skyrl_engine.errors import ContractError, PluginBrokenError
from skyrl_engine.spans import Spans
from skyrl_engine.workers.batch import ShardBatch
from skyrl_engine.workers.dispatch import batch_structure, cut, token_weights
from skyrl_engine_collators.packed.collator import PackedCollator
from skyrl_engine_collators.padded.collator import PaddedCollator


@st.composite
def samples(draw: st.DrawFn) -> SampleColumns:
    actions = draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    prompts = draw(st.lists(st.integers(0, 4), min_size=len(actions), max_size=len(actions)))
    tokens = np.maximum(1, np.add(actions, prompts))
    action_offsets = offsets_of(actions)
    total = int(action_offsets[-1])
    seed = draw(st.integers(0, 2**32 - 1))
    numbers = np.random.default_rng(seed)
    return SampleColumns.create(
        input_ids=numbers.integers(0, 1000, int(tokens.sum())),
        token_offsets=offsets_of(tokens),
        action_offsets=action_offsets,
        loss_weight=numbers.integers(0, 2, total).astype(np.uint8),
        columns={"place": np.arange(total, dtype=np.float32), "unused": np.zeros(total, dtype=np.float32)},
        sample_ids=numbers.permutation(len(actions)) * 10,
    )


@settings(deadline=None)
@given(samples(), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 4)), st.sampled_from(["loss", "actions"]))
def test_every_token_reaches_one_rank_with_its_label_and_weight(columns, dp, rows, selection):
    _check_every_token(columns, PaddedCollator(pad_token_id=999_999), Layout(dp=dp, micro_batch_rows=rows), selection)


@settings(deadline=None)
@given(
    samples(),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.one_of(st.none(), st.integers(12, 30)),
    st.sampled_from(["ffd", "balanced", "concat"]),
    st.sampled_from(["loss", "actions"]),
)
def test_every_token_of_packed_rows_too(columns, dp, tp, tokens, policy, selection):
    collator = PackedCollator(pad_token_id=999_999, policy=policy)
    _check_every_token(columns, collator, Layout(dp=dp, tp=tp, micro_batch_tokens=tokens), selection)


def _check_every_token(columns, collator, layout, selection):
    """The definition: walk over samples and actions; a token is scored once, one column after its predecessor, with its own weight."""
    (mini_batch,) = collator.plan(columns.lengths, layout).mini_batches
    structure = batch_structure(columns, mini_batch, None)
    order = mini_batch.samples
    weights = np.concatenate(
        [np.arange(columns.action_offsets[i], columns.action_offsets[i + 1], dtype=np.float64) for i in order] or [np.zeros(0)]
    )
    assert len(weights) == len(structure.loss_weight)
    shards = cut(columns, mini_batch, weights, ["place"])
    assert len({len(shard.micro_batches) for shard in shards}) == 1

    found = {}
    for shard in shards:
        assert set(shard.columns.columns) == {"place"}, "only what the loss needs travels"
        for micro_batch in ShardBatch(shard, collator, "the collator", selection, Spans()):
            scored = micro_batch.samples
            flat = micro_batch.inputs["input_ids"].flatten()
            mask = micro_batch.inputs["attention_mask"].flatten()
            if micro_batch.cu_seqlens is not None:
                for row, bounds in enumerate(micro_batch.cu_seqlens):
                    assert (bounds % layout.tp == 0).all(), "the alignment of the plan reaches the rank that builds"
                    assert micro_batch.inputs["position_ids"][row, bounds[:-1]].sum() == 0, "positions restart where samples begin"
            assert (mask[micro_batch.positions] == 1).all(), "a token is scored from a real predecessor"
            assert (flat[micro_batch.positions + 1] == micro_batch.labels).all()
            for k, sequence in enumerate(scored.sequence_index):
                key = (int(scored.sample_ids[sequence]), int(scored.scored.values[k]))
                assert key not in found
                found[key] = (int(micro_batch.labels[k]), float(scored.columns["place"][k]), float(scored.weights[k]))

    expected = {}
    for i in range(len(columns)):
        length = int(columns.token_offsets[i + 1] - columns.token_offsets[i])
        first, last = int(columns.action_offsets[i]), int(columns.action_offsets[i + 1])
        for j in range(last - first):
            position = length - (last - first) + j
            carries = columns.loss_weight[first + j] != 0
            if position > 0 and (carries or selection == "actions"):
                token = int(columns.input_ids[columns.token_offsets[i] + position])
                expected[int(columns.sample_ids[i]), j] = (token, float(first + j), float(first + j))
    assert found == expected


class _Broken:
    empty_sequence = "count"

    def __init__(self, weights):
        self._weights = weights

    def weights(self, structure):
        return self._weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(2), r"returned float64\[2\], not float64\[3\]"),
        (np.ones(3, np.float32), r"returned float32\[3\], not float64\[3\]"),
        ([1.0, 1.0, 1.0], "returned list"),
        (np.array([1.0, np.nan, 1.0]), "gave a token of sample 0 the weight nan"),
    ],
)
def test_a_reducer_that_breaks_its_contract_is_named(weights, message):
    columns = SampleColumns.create(input_ids=np.arange(4), token_offsets=offsets_of([4]), action_offsets=offsets_of([3]))
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout()).mini_batches
    with pytest.raises(ContractError, match=message):
        token_weights("mine", _Broken(weights), batch_structure(columns, mini_batch, None))


def test_a_reducer_that_fails_is_named_with_its_own_line():
    class Broken:
        def weights(self, structure):
            return structure.loss_weight / structure.masses

    columns = SampleColumns.from_rollouts(prompts=[[1]], responses=[[2, 3]])
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout()).mini_batches
    with pytest.raises(PluginBrokenError, match=r"reducer 'x' failed in weights: AttributeError: .*'masses'") as caught:
        token_weights("reducer 'x'", Broken(), batch_structure(columns, mini_batch, None))
    (place,) = caught.value.details
    assert place.endswith("in weights")
