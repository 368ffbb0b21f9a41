"""`padded` prepares ahead: the same bytes in any order of calls, memory of its own for every call, and little of it."""

import copy
import pickle
from threading import Thread

import attrs
import numpy as np
import pytest

from skyrl_engine import DataError
from skyrl_engine.contracts import MODEL_INPUTS, Layout, SampleColumns, offsets_of
from skyrl_engine_collators.padded import ahead, native
from skyrl_engine_collators.padded.collator import PaddedCollator

pytestmark = pytest.mark.usefixtures("engine")


def columns_of(samples=60, longest=40, seed=0):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, samples)
    return SampleColumns.create(
        input_ids=generator.integers(0, 99, int(lengths.sum())),
        token_offsets=offsets_of(lengths),
        action_offsets=offsets_of(generator.integers(0, lengths + 1)),
    )


def rank_of(columns, rows=4, dp=3):
    (mini_batch,) = PaddedCollator().plan(columns.lengths, Layout(dp=dp, micro_batch_rows=rows)).mini_batches
    return mini_batch.ranks[-1]


def arrays_of(batch):
    index = {name: getattr(batch.gather, name) for name in ("actions", "rows", "columns")}
    lengths = {"lengths": batch.sequence_lengths.values}
    return {**{name: tensor.numpy() for name, tensor in batch.fields.items()}, **index, **lengths}


def assert_same(batch, other_batch):
    arrays, other_arrays = arrays_of(batch), arrays_of(other_batch)
    assert arrays.keys() == other_arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, other_arrays[name], err_msg=name, strict=True)


def build_alone(columns, micro_batch, fields=MODEL_INPUTS):
    return PaddedCollator().build(columns, attrs.evolve(micro_batch, order=None), fields=fields)


@pytest.mark.parametrize("order", ["given", "reversed", "twice", "every other", "shuffled"])
def test_builds_in_any_order_give_the_same_bytes_in_memory_of_their_own(order):
    columns = columns_of()
    rank = rank_of(columns)
    chosen = {
        "given": list(rank),
        "reversed": list(rank[::-1]),
        "twice": [micro_batch for micro_batch in rank for _ in range(2)],
        "every other": list(rank[::2]),
        "shuffled": [rank[place] for place in np.random.default_rng(1).permutation(len(rank))],
    }[order]
    collator = PaddedCollator()
    batches = [collator.build(columns, micro_batch, fields=MODEL_INPUTS) for micro_batch in chosen]
    for batch in batches:  # what was handed out belongs to its caller
        for values in arrays_of(batch).values():
            np.add(values, 1, out=values)
    for batch, micro_batch in zip(batches, chosen, strict=True):
        for values in arrays_of(batch).values():
            np.subtract(values, 1, out=values)
        assert_same(batch, build_alone(columns, micro_batch))


def test_other_columns_other_fields_and_changed_plans_are_built_anew():
    columns, other_columns = columns_of(), columns_of(seed=1)
    rank = rank_of(columns)
    wide = [attrs.evolve(micro_batch, width=50, action_width=50) for micro_batch in rank]
    collator = PaddedCollator()
    collator.build(columns, rank[0], fields=MODEL_INPUTS)
    assert_same(collator.build(columns, rank[1], fields=["input_ids"]), build_alone(columns, rank[1], ["input_ids"]))
    collator.build(columns, rank[0], fields=MODEL_INPUTS)
    assert_same(collator.build(columns, wide[1], fields=MODEL_INPUTS), build_alone(columns, wide[1]))
    assert_same(collator.build(columns, rank[1], fields=["input_ids"]), build_alone(columns, rank[1], ["input_ids"]))
    collator.build(columns, rank[0], fields=MODEL_INPUTS)
    assert_same(collator.build(other_columns, wide[1], fields=MODEL_INPUTS), build_alone(other_columns, wide[1]))
    assert_same(collator.build(columns, rank[2]), build_alone(columns, rank[2], None))


@pytest.fixture
def calls(monkeypatch, engine):
    """The micro-batches of each call of the kernels."""
    if engine == "numpy":
        pytest.skip("NumPy makes one at a time")
    calls = []
    build_tokens = native.build_tokens

    def count_call(kernels, columns, micro_batches, *arguments):
        calls.append(micro_batches)
        return build_tokens(kernels, columns, micro_batches, *arguments)

    monkeypatch.setattr(native, "build_tokens", count_call)
    return calls


def test_one_call_of_the_kernels_makes_what_fits_and_no_more(monkeypatch, calls):
    columns = columns_of()
    rank = rank_of(columns)
    collator = PaddedCollator()
    for micro_batch in rank:
        collator.build(columns, micro_batch, fields=MODEL_INPUTS)
    assert [len(call) for call in calls] == [len(rank)]
    calls.clear()
    limit = 3 * max(micro_batch.rows * (24 * micro_batch.width + 24 * micro_batch.action_width) for micro_batch in rank)
    monkeypatch.setattr(ahead, "MOST_BYTES", limit)
    for micro_batch in rank:
        collator.build(columns, micro_batch, fields=MODEL_INPUTS)
    assert 1 < len(calls) < len(rank)
    for call in calls.copy():  # which grows by what is built to compare with
        batches = [build_alone(columns, micro_batch) for micro_batch in call]
        assert len(call) == 1 or sum(values.nbytes for batch in batches for values in arrays_of(batch).values()) <= limit * 1.1
    calls.clear()
    for micro_batch in rank[:0:-1]:
        collator.build(columns, micro_batch, fields=MODEL_INPUTS)
    assert [len(call) for call in calls] == [1] * (len(rank) - 1), "nobody follows the order, so nothing is made ahead"
    calls.clear()
    monkeypatch.setattr(ahead, "MOST_BYTES", 1)
    for micro_batch in rank:
        collator.build(columns, micro_batch, fields=MODEL_INPUTS)
    assert [len(call) for call in calls] == [1] * len(rank), "a micro-batch above the limit is made alone"


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_call_is_as_large_as_the_limit_and_not_a_byte_larger(monkeypatch, calls, at_once):
    """Seven micro-batches of 2 rows of 5 tokens, 3 of them response: three fields of 8 bytes a token, three places of each response token."""
    samples = 14
    columns = SampleColumns.create(
        input_ids=np.arange(5 * samples), token_offsets=offsets_of([5] * samples), action_offsets=offsets_of([3] * samples)
    )
    rank = rank_of(columns, rows=2, dp=1)
    size = 2 * (3 * 8 * 5 + 3 * 8 * 3)
    for limit, most in ((at_once * size, at_once), (at_once * size + size - 1, at_once)):
        monkeypatch.setattr(ahead, "MOST_BYTES", limit)
        calls.clear()
        collator = PaddedCollator()
        for micro_batch in rank:
            assert_same(collator.build(columns, micro_batch, fields=MODEL_INPUTS), build_alone(columns, micro_batch))
        # `build_alone` makes one at a time: what is left are the calls of the collator
        lengths = [len(call) for call in calls if call[0].order is not None]
        assert lengths == [most] * (7 // most) + ([7 % most] if 7 % most else [])


@pytest.mark.parametrize("count", [2, 3])
def test_the_micro_batch_before_one_that_does_not_fit_is_built(count):
    columns = columns_of(samples=4 * count, longest=9)
    rank = rank_of(columns, dp=1)
    assert len(rank) == count
    lengths = np.diff(columns.token_offsets)
    lengths[rank[1].samples[0]] = rank[1].width + 1
    longer = SampleColumns.create(
        input_ids=np.zeros(int(lengths.sum()), dtype=np.int64),
        token_offsets=offsets_of(lengths),
        action_offsets=columns.action_offsets,
    )
    collator = PaddedCollator()
    assert_same(collator.build(longer, rank[0], fields=MODEL_INPUTS), build_alone(longer, rank[0]))
    with pytest.raises(DataError, match="tokens"):
        collator.build(longer, rank[1], fields=MODEL_INPUTS)


def test_a_sample_that_does_not_fit_is_named_when_its_turn_comes():
    columns = columns_of()
    rank = rank_of(columns)
    lengths = np.diff(columns.token_offsets)
    sample = rank[2].samples[0]
    lengths[sample] = rank[2].width + 1
    longer = SampleColumns.create(
        input_ids=np.zeros(int(lengths.sum()), dtype=np.int64),
        token_offsets=offsets_of(lengths),
        action_offsets=columns.action_offsets,
        loss_weight=columns.loss_weight,
    )
    collator = PaddedCollator()
    for micro_batch in rank[:2]:
        assert_same(collator.build(longer, micro_batch, fields=MODEL_INPUTS), build_alone(longer, micro_batch))
    with pytest.raises(DataError, match=rf"sample {sample} has {lengths[sample]} tokens"):
        collator.build(longer, rank[2], fields=MODEL_INPUTS)
    assert_same(collator.build(longer, rank[3], fields=MODEL_INPUTS), build_alone(longer, rank[3]))


def test_copies_of_a_collator_and_of_a_plan_build_the_same():
    columns = columns_of()
    rank = rank_of(columns)
    collator = PaddedCollator()
    collator.build(columns, rank[0], fields=MODEL_INPUTS)
    for clone in (pickle.loads(pickle.dumps(collator)), copy.deepcopy(collator)):
        assert clone == collator
        sent = pickle.loads(pickle.dumps(rank))
        assert [micro_batch.following for micro_batch in sent] == [sent[place + 1 :] for place in range(len(sent))]
        for micro_batch, original in zip(sent, rank, strict=True):
            assert_same(clone.build(columns, micro_batch, fields=MODEL_INPUTS), build_alone(columns, original))


def test_threads_that_share_a_collator_never_share_memory():
    columns = columns_of(samples=200)
    rank = rank_of(columns, rows=2, dp=1)
    collator, batches_of_threads = PaddedCollator(), []

    def build_all():
        batches_of_threads.append([collator.build(columns, micro_batch, fields=MODEL_INPUTS) for micro_batch in rank])

    threads = [Thread(target=build_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(batches_of_threads) == 4
    places = [
        values.ctypes.data
        for batches in batches_of_threads
        for batch in batches
        for values in arrays_of(batch).values()
        if values.size
    ]
    assert len(set(places)) == len(places)
    for batches in batches_of_threads:
        for batch, micro_batch in zip(batches, rank, strict=True):
            assert_same(batch, build_alone(columns, micro_batch))
