"""A rank is sent and builds the right tokens, labels and weights, whatever the plan."""

import pickle
import weakref

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_engine.contracts.kinds.backend import StepCounts
from skyrl_engine.contracts.kinds.collator import GatherIndex
from skyrl_engine.contracts.kinds.reducer import FunctionReducer, PerSequence
from skyrl_engine.contracts.values.buffers import ReusableJoin
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.errors import ContractError, DataError, PluginBrokenError
from skyrl_engine.spans import Spans
from skyrl_engine.testing.collators.strategies import sample_columns
from skyrl_engine.testing.subject import part_of
from skyrl_engine.workers import scored_tokens
from skyrl_engine.workers.batch import ShardBatch
from skyrl_engine.workers.dispatch import batch_structure, compact_weights, cut, token_weights
from skyrl_engine.workers.launch import WorkerGroup
from skyrl_engine.workers.worker import Pass
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
    shards = list(cut(columns, mini_batch, weights, ["place"]))
    assert len({len(shard.micro_batches) for shard in shards}) == 1
    lengths = [int(end - start) for start, end in zip(columns.token_offsets[:-1], columns.token_offsets[1:], strict=True)]
    step = StepCounts(sequences=sum(length > 0 for length in lengths), tokens=sum(lengths))

    found = {}
    for shard in shards:
        assert set(shard.columns.columns) == {"place"}, "only what the loss needs travels"
        for micro_batch in ShardBatch(shard, part_of(collator, "the collator", "collator"), selection, Spans()):
            assert micro_batch.step == step, "every rank knows the whole step"
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


@settings(deadline=None, max_examples=30)
@given(sample_columns(max_samples=9), st.integers(1, 3), st.sampled_from(["loss", "actions"]))
def test_weights_in_short_are_the_same_weights(columns, dp, selection):
    """A divisor per sequence reaches every token as the weight that the reducer would have given it, to the bit."""
    collator = PackedCollator(pad_token_id=1)
    (mini_batch,) = collator.plan(columns.lengths, Layout(dp=dp)).mini_batches
    structure = batch_structure(columns, mini_batch, None)
    short = PerSequence(1.0 + np.arange(len(structure), dtype=np.float64) / 3)
    built = [
        [
            micro_batch.samples.weights
            for shard in cut(columns, mini_batch, weights, [])
            for micro_batch in ShardBatch(shard, part_of(collator, "the collator", "collator"), selection, Spans())
        ]
        for weights in (short, short.expand(structure))
    ]
    for own, expanded in zip(*built, strict=True):
        assert own.dtype == np.float64
        np.testing.assert_array_equal(own, expanded)


class Backwards(PaddedCollator):
    def build(self, columns, micro_batch, *, fields=None):
        batch = super().build(columns, micro_batch, fields=fields)
        return evolve(batch, gather=GatherIndex(*(getattr(batch.gather, name)[::-1] for name in ("actions", "rows", "columns"))))


@pytest.mark.parametrize("selection", ["loss", "actions"])
@pytest.mark.parametrize(("window", "collator"), [(1, PaddedCollator()), (7, PaddedCollator()), (1 << 16, Backwards())])
def test_neither_the_window_nor_the_order_of_a_gather_index_changes_a_byte(monkeypatch, selection, window, collator):
    """The first sample of every three has no prompt, so its first token has no predecessor; every fourth has no response."""
    lengths, numbers = np.arange(3, 15), np.random.default_rng(0)
    actions = np.where(np.arange(12) % 4 == 3, 0, np.where(np.arange(12) % 3 == 0, lengths, lengths // 2))
    total = int(actions.sum())
    columns = SampleColumns.create(
        input_ids=numbers.integers(0, 99, int(lengths.sum())),
        token_offsets=offsets_of(lengths),
        action_offsets=offsets_of(actions),
        loss_weight=numbers.integers(0, 2, total).astype(np.uint8),
        columns={"place": np.arange(total, dtype=np.float32), "ids": numbers.integers(0, 99, (total, 2))},
    )
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout(micro_batch_rows=2)).mini_batches
    (shard,) = cut(columns, mini_batch, numbers.random(total), ["place", "ids"])

    def bytes_of(collator):
        built = []
        for micro_batch in ShardBatch(shard, part_of(collator, "the collator", "collator"), selection, Spans()):
            scored = micro_batch.samples
            micro_batches = [
                micro_batch.positions,
                micro_batch.labels,
                micro_batch.candidates["ids"],
                scored.weights,
                scored.columns["place"],
                scored.scored.values,
            ]
            built.append(
                [np.asarray(values).tobytes() for values in (*micro_batches, scored.scored.offsets, scored.action_lengths)]
            )
        return built

    expected = bytes_of(PaddedCollator())
    monkeypatch.setattr(scored_tokens, "WINDOW", window)
    assert bytes_of(collator) == expected


def test_a_reducer_sees_which_stretches_are_of_one_attempt():
    """In the order of the mini-batch, whichever rank they go to."""
    columns = SampleColumns.from_lists(input_ids=[[1, 2]] * 5, trajectory_ids=np.array([4, 4, 9, 9, 4]))
    for mini_batch in PaddedCollator().plan(columns.lengths, Layout(dp=2, mini_batch_size=4)).mini_batches:
        structure = batch_structure(columns, mini_batch, None)
        assert structure.trajectory_ids.tolist() == [[4, 4, 9, 9, 4][sample] for sample in structure.sample_ids]


def test_a_reducer_sees_the_columns_and_values_that_it_needs():
    """In the order of the mini-batch; texts stay on the controller."""
    columns = SampleColumns.from_lists(
        input_ids=[[1, 2], [3, 4, 5], [6, 7]],
        columns={
            "x": [[1, 2], [3, 4, 5], [6, 7]],
            "ids": [[[1], [2]], [[3], [4], [5]], [[6], [7]]],
            "y": [[0, 0], [0, 0, 0], [0, 0]],
        },
        sample_values={"domain": np.array(["a", "b", "c"]), "hard": np.array([1, 2, 3])},
    )
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout(dp=3)).mini_batches
    reducer = FunctionReducer(
        "mine", lambda structure, _: structure.loss_weight / 1.0, None, needs=("x", "ids[k]", "sample:domain")
    )
    structure = batch_structure(columns, mini_batch, None, reducer=part_of(reducer, "mine", "reducer"))
    order = structure.sample_ids.tolist()
    assert set(structure.columns) == {"x", "ids"}
    rows = [[1, 2], [3, 4, 5], [6, 7]]
    assert structure.columns["x"].tolist() == [number for sample in order for number in rows[sample]]
    assert structure.columns["ids"][:, 0].tolist() == structure.columns["x"].tolist()
    assert structure.sample_values["domain"].tolist() == ["abc"[sample] for sample in order]
    for shard in cut(columns, mini_batch, compact_weights(part_of(reducer, "mine", "reducer"), structure), []):
        assert set(shard.columns.sample_values) == {"hard"}
    for need, what in (("z", "column 'z'"), ("sample:z", "value 'z'")):
        lacking = FunctionReducer("mine", reducer.function, None, needs=(need,))
        with pytest.raises(DataError, match=f"mine needs the {what} of the samples, the data has"):
            batch_structure(columns, mini_batch, None, reducer=part_of(lacking, "mine", "reducer"))


def test_rewards_in_double_reach_ranks_and_reducers_in_single():
    """Collators and losses see one type, whatever the controller compares rewards in."""
    rewards = np.array([10.1, 0.2, 1 / 3, 2.0])
    columns = SampleColumns.from_lists(input_ids=[[1, 2], [3, 4]]).with_columns({"rewards": rewards})
    assert columns.columns["rewards"] is rewards
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout(dp=2)).mini_batches
    reducer = part_of(FunctionReducer("mine", lambda *_: np.ones(4), None, needs=("rewards",)), "mine", "reducer")
    structure = batch_structure(columns, mini_batch, None, reducer=reducer)
    shards = list(cut(columns, mini_batch, compact_weights(reducer, structure), ["rewards"]))
    assert {each.dtype for each in (structure.columns["rewards"], *(shard.columns.columns["rewards"] for shard in shards))} == {
        np.dtype(np.float32)
    }
    assert np.concatenate([shard.columns.columns["rewards"] for shard in shards]).tolist() == rewards.astype(np.float32).tolist()


def test_a_reducer_may_give_its_weights_in_short():
    columns = SampleColumns.from_lists(input_ids=[[1, 2, 3], [4, 5]])
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout()).mini_batches
    structure = batch_structure(columns, mini_batch, None)

    def reducer(divisor):
        return FunctionReducer("mine", lambda _structure, _config: PerSequence(np.asarray(divisor)), None)

    good = reducer([2.0, 4.0])
    assert isinstance(compact_weights(part_of(good, "mine", "reducer"), structure), PerSequence)
    assert (
        token_weights(part_of(good, "mine", "reducer"), structure).tolist()
        == good.weights(structure).tolist()
        == [0.0, 0.5, 0.5, 0.0, 0.25]
    )
    with pytest.raises(ContractError, match="mine gave a token of sample 1 the weight nan"):
        compact_weights(part_of(reducer([2.0, 0.0]), "mine", "reducer"), structure)
    with pytest.raises(ContractError, match=r"mine returned divisors float64\[3\] for 2 sequences"):
        compact_weights(part_of(reducer([2.0, 4.0, 8.0]), "mine", "reducer"), structure)


@settings(deadline=None)
@given(
    sample_columns(max_samples=9, carries=("router_replay", "vision")),
    st.integers(1, 3),
    st.sampled_from([PaddedCollator(pad_token_id=1), PackedCollator(pad_token_id=1, policy="balanced")]),
)
def test_expert_routes_and_images_reach_the_rank_of_their_sample_and_no_other(columns, dp, collator):
    (mini_batch,) = collator.plan(columns.lengths, Layout(dp=dp)).mini_batches
    weights = np.ones(len(columns.loss_weight))
    shards = [pickle.loads(pickle.dumps(shard)) for shard in cut(columns, mini_batch, weights, [])]
    position = {int(sample): place for place, sample in enumerate(columns.sample_ids)}
    for name, view in columns.extras.items():
        assert sum(len(shard.columns.extras[name].values) for shard in shards) == view.lengths.sum(), "sent once, to one rank"
    met = []
    for shard in shards:
        for micro_batch in ShardBatch(shard, part_of(collator, "the collator", "collator"), "loss", Spans()):
            order = [position[sample_id] for sample_id in micro_batch.samples.sample_ids.tolist()]
            if "expert_routes" in columns.extras:  # in row order, which is the samples' order
                captured = micro_batch.inputs["expert_routes"][~micro_batch.inputs["router_padding_mask"]].numpy()
                assert captured.tobytes() == b"".join(columns.extras["expert_routes"][sample].tobytes() for sample in order)
            for place, sample in enumerate(order):
                for name, offsets in micro_batch.ragged_offsets.items():
                    mine = micro_batch.inputs[name][offsets[place] : offsets[place + 1]].numpy()
                    assert mine.tobytes() == columns.extras[name][sample].tobytes()
            assert micro_batch.ragged_offsets.keys() == {"pixel_values", "image_grid_thw"} & columns.extras.keys()
            met += order
    assert sorted(met) == list(range(len(columns)))


class _Recorded:
    """A transport that keeps what is put and says what every rank is called with; nothing runs."""

    ended = None

    def __init__(self):
        self.put_shards = []

    def put(self, shard):
        self.put_shards.append(pickle.loads(pickle.dumps(shard)))  # as it would travel
        return len(self.put_shards) - 1

    def send(self, messages):
        return lambda: [self.put_shards[message.shard] for message in messages]


def _make_columns_with_images():
    """Two samples with an image each, and one of text."""
    grids = [[[1, 2, 2]], [[1, 2, 4]], None]
    pixels = [np.full((4, 6), 1.0, np.float32), np.full((8, 6), 2.0, np.float32), None]
    extras = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": [[0, 1, 0], [1, 1, 0], [0, 0, 0]]}
    return SampleColumns.from_lists(input_ids=[[9, 3, 9], [3, 3, 9], [9, 9, 9]], extras=extras)


@pytest.mark.parametrize("collator", [PaddedCollator(pad_token_id=1), PackedCollator(pad_token_id=1)])
def test_pixels_are_sent_to_the_first_pipeline_stage_alone(collator):
    columns, topology, transport = _make_columns_with_images(), Topology(dp=2, tp=2, pp=2), _Recorded()
    (mini_batch,) = collator.plan(columns.lengths, Layout(dp=2, pp=2)).mini_batches
    group = WorkerGroup(transport, topology)
    placed = group.put(cut(columns, mini_batch, np.ones(9), []))
    assert len(transport.put_shards) == 4, "one for the first stage and one for those after it, whatever ranks share them"
    for rank, shard in enumerate(group.run(Pass("evaluate"), placed).result()):
        place = topology.coords(rank)
        assert ("pixel_values" in shard.columns.extras) == (place.pp == 0)
        first = list(
            ShardBatch(transport.put_shards[placed[place.dp].first], part_of(collator, "the collator", "collator"), "loss", Spans())
        )
        for here, there in zip(
            ShardBatch(shard, part_of(collator, "the collator", "collator"), "loss", Spans()), first, strict=True
        ):
            assert here.inputs.keys() | {"pixel_values"} == there.inputs.keys()
            for name in here.inputs:
                np.testing.assert_array_equal(here.inputs[name], there.inputs[name])


@pytest.mark.parametrize(("columns", "pp"), [(_make_columns_with_images(), 1), (SampleColumns.from_lists(input_ids=[[1, 2]]), 2)])
def test_a_shard_without_pixels_to_spare_is_sent_once(columns, pp):
    transport = _Recorded()
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout(pp=pp)).mini_batches
    shards = cut(columns, mini_batch, np.ones(len(columns.loss_weight)), [])
    (placed,) = WorkerGroup(transport, Topology(pp=pp)).put(shards)
    assert (len(transport.put_shards), placed.first) == (1, placed.later)


def test_a_shard_that_was_sent_is_not_held_while_the_next_is_made():
    """So the controller holds one rank's columns at a time, and the next one's are made in the same memory."""
    columns = SampleColumns.from_lists(input_ids=[[1] * 300, [2] * 300, [3] * 300])
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout(dp=3)).mini_batches
    places, before = set(), []

    class Sending:
        def put(self, shard):
            assert all(reference() is None for reference in before)
            before.append(weakref.ref(shard))
            places.add(shard.columns.input_ids.ctypes.data)
            return shard.columns.input_ids.tolist()

    group = WorkerGroup(Sending(), Topology(dp=3))
    placed = group.put(cut(columns, mini_batch, np.ones(900), [], ReusableJoin()))
    assert [each.first for each in placed] == [[1] * 300, [2] * 300, [3] * 300]
    assert len(places) == 1


def test_a_collator_that_leaves_out_what_the_samples_have_is_named():
    class Forgetful(PaddedCollator):
        def build(self, columns, micro_batch, *, fields=None):
            return super().build(columns, micro_batch, fields=("input_ids", "attention_mask"))

    columns = SampleColumns.from_lists(input_ids=[[1, 2]], routes=[[[[0]]]])
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout()).mini_batches
    (shard,) = cut(columns, mini_batch, np.ones(2), [])
    with pytest.raises(ContractError, match="collator 'forgetful' left out expert_routes, which the samples have"):
        list(ShardBatch(shard, part_of(Forgetful(), "collator 'forgetful'", "collator"), "loss", Spans()))


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
        token_weights(part_of(_Broken(weights), "mine", "reducer"), batch_structure(columns, mini_batch, None))


def test_a_reducer_that_fails_is_named_with_its_own_line():
    class Broken:
        def weights(self, structure):
            return structure.loss_weight / structure.masses

    columns = SampleColumns.from_rollouts(prompts=[[1]], responses=[[2, 3]])
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout()).mini_batches
    with pytest.raises(PluginBrokenError, match=r"reducer 'x' failed in weights: AttributeError: .*'masses'") as caught:
        token_weights(part_of(Broken(), "reducer 'x'", "reducer"), batch_structure(columns, mini_batch, None))
    (place,) = caught.value.details
    assert place.endswith("in weights")


def test_a_reducer_is_told_the_mean_mass_of_the_steps_of_a_batch():
    """Two mini-batches of 6 and 2 tokens with loss: 4 each on average; a batch of one step has no other mass than its own."""
    columns = SampleColumns.create(
        input_ids=np.arange(12), token_offsets=offsets_of([4, 4, 2, 2]), action_offsets=offsets_of([3, 3, 1, 1])
    )
    plan = PackedCollator(pad_token_id=1).plan(columns.lengths, Layout(dp=1, mini_batch_size=2))
    structures = [
        batch_structure(columns, mini_batch, None, mini_batches=len(plan.mini_batches)) for mini_batch in plan.mini_batches
    ]
    assert [float(structure.mass.sum()) for structure in structures] == [6.0, 2.0]
    assert [structure.mean_mass for structure in structures] == [4.0, 4.0]
    assert batch_structure(columns, plan.mini_batches[0], None).mean_mass is None
