"""Outputs of ranks and batches: joining, choosing, expanding to the action axis."""

import numpy as np
import pytest

from skyrl_engine.contracts.values.outputs import BatchOutput, Metric, RankOutput
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.contracts.values.topology import RankCoords


def output_of(ids: list[int], scored: list[list[int]], lengths: list[int], **metrics: Metric) -> RankOutput:
    """Log-probabilities are 10 * sample id + the place on the action axis."""
    values = [[10 * sample_id + place for place in places] for sample_id, places in zip(ids, scored, strict=True)]
    return RankOutput(
        np.array(ids, dtype=np.int64),
        np.array(lengths, dtype=np.int64),
        Ragged.from_list(scored, np.int32),
        {"logprobs": Ragged.from_list(values, np.float32)},
        metrics,
    )


def test_concat_keeps_order_values_and_types() -> None:
    coords = RankCoords(rank=3, dp=1)
    joined = RankOutput.concat(
        [output_of([4, 2], [[0, 2], []], [3, 1], loss=Metric.sum(1)), output_of([7], [[1]], [2], loss=Metric.sum(2))], coords
    )
    assert joined.sample_ids.tolist() == [4, 2, 7]
    assert joined.action_lengths.tolist() == [3, 1, 2]
    assert joined.scored.values.tolist() == [0, 2, 1]
    assert joined.scored.values.dtype == np.int32
    assert joined.fields["logprobs"].values.tolist() == [40, 42, 71]
    assert joined.fields["logprobs"].values.dtype == np.float32
    assert joined.scored.offsets.tolist() == joined.fields["logprobs"].offsets.tolist() == [0, 2, 2, 3]
    assert joined.metrics == {"loss": Metric.sum(3)}
    assert joined.coords == coords


def test_concat_with_parts_without_samples_keeps_fields_types_and_their_metrics() -> None:
    empty = RankOutput.concat([])
    assert len(empty.sample_ids) == 0
    counted = RankOutput(empty.sample_ids, empty.action_lengths, empty.scored, {}, {"loss": Metric.sum(5)})
    joined = RankOutput.concat([counted, output_of([1], [[0]], [1], loss=Metric.sum(1)), counted])
    assert joined.fields["logprobs"].values.tolist() == [10]
    assert joined.fields["logprobs"].values.dtype == np.float32
    assert joined.metrics == {"loss": Metric.sum(11)}
    only_empty = RankOutput.concat([counted, counted])
    assert only_empty.fields == {}
    assert only_empty.metrics == {"loss": Metric.sum(10)}


def test_concat_in_an_order_is_concat_and_take() -> None:
    parts = [output_of([4, 2], [[0, 2], []], [3, 1], loss=Metric.sum(1)), RankOutput.empty(), output_of([7], [[1]], [2])]
    for order in ([2, 0, 1], [1, 2], [0, 1, 2], []):
        joined, wanted = RankOutput.concat(parts, order=np.array(order, dtype=np.int64)), RankOutput.concat(parts).take(order)
        assert joined.sample_ids.tolist() == wanted.sample_ids.tolist()
        assert joined.action_lengths.tolist() == wanted.action_lengths.tolist()
        assert joined.scored.values.tolist() == wanted.scored.values.tolist()
        assert joined.scored.values.dtype == np.int32
        assert joined.fields["logprobs"].values.tolist() == wanted.fields["logprobs"].values.tolist()
        assert joined.fields["logprobs"].offsets.tolist() == wanted.scored.offsets.tolist()
        assert joined.metrics == wanted.metrics


def test_take_chooses_positions() -> None:
    taken = output_of([4, 2, 7], [[0, 2], [], [1]], [3, 1, 2]).take([2, 0])
    assert taken.sample_ids.tolist() == [7, 4]
    assert taken.action_lengths.tolist() == [2, 3]
    assert taken.fields["logprobs"].values.tolist() == [71, 40, 42]


def test_fields_that_do_not_match_the_scored_tokens_are_our_mistake() -> None:
    scored = Ragged.from_list([[0, 1], [0]], np.int32)
    with pytest.raises(AssertionError, match="logprobs does not hold one value per scored token"):
        RankOutput(np.arange(2), np.array([2, 1]), scored, {"logprobs": Ragged(np.zeros(3, np.float32), offsets_of([1, 2]))})
    with pytest.raises(AssertionError, match="different numbers of samples"):
        RankOutput(np.arange(3), np.array([2, 1]), scored)


def test_on_actions_fills_what_was_not_scored() -> None:
    parts = output_of([0, 1, 2], [[0, 2], [], [1]], [3, 2, 2])
    output = BatchOutput(parts.sample_ids, parts.action_lengths, parts.scored, parts.fields)
    expanded = output.on_actions("logprobs", fill=-1)
    assert expanded.values.tolist() == [0, -1, 2, -1, -1, -1, 21]
    assert expanded.values.dtype == np.float32
    assert expanded.offsets.tolist() == [0, 3, 5, 7]


def test_a_gated_call_still_has_one_empty_record_per_sample() -> None:
    nothing = Ragged.from_list([[], []], np.int32)
    output = BatchOutput(np.array([5, 6]), np.array([3, 1]), nothing)
    assert len(output) == 2
    assert output.to_list() == [{"sample_id": 5}, {"sample_id": 6}]


def test_to_list_is_plain() -> None:
    parts = output_of([3, 1], [[0], [0, 1]], [1, 2])
    output = BatchOutput(parts.sample_ids, parts.action_lengths, parts.scored, parts.fields)
    assert output.to_list() == [{"sample_id": 3, "logprobs": [30.0]}, {"sample_id": 1, "logprobs": [10.0, 11.0]}]
