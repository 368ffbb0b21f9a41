"""The dicts of merger `list`: what they hold, in whose order, and when they are made."""

import pickle

import numpy as np
import pytest

from skyrl_engine.contracts import BatchOutput, BatchPlan, Layout, MiniBatchPlan, Ragged, RankCoords, RankOutput, one_sample_per_row
from skyrl_engine_mergers.listed import ListedOutput, ListMerger


def output_of(rank: int, ids: list[int], actions: list[int], scored: list[list[int]], *, fields: bool = True) -> RankOutput:
    """Log-probabilities are minus the sample id, token losses the place on the action axis."""
    places = Ragged.from_list(scored, np.int32)
    logprobs = Ragged.from_list([[-sample_id] * len(row) for sample_id, row in zip(ids, scored, strict=True)], np.float32)
    values = {"logprobs": logprobs, "token_loss": Ragged(places.values.astype(np.float32), places.offsets)} if fields else {}
    return RankOutput(np.array(ids), np.array(actions), places, values, coords=RankCoords(rank=rank, dp=rank))


PLAN = BatchPlan(
    (MiniBatchPlan(((one_sample_per_row(np.array([2, 0]), 4, 3),), (one_sample_per_row(np.array([1]), 4, 3),))),),
    Layout(dp=2),
    np.array([10, 11, 12]),
)
OUTPUTS = [output_of(0, [12, 10], [3, 2], [[0, 2], [1]]), output_of(1, [11], [1], [[]])]


def test_one_dict_per_sample_in_the_caller_s_order() -> None:
    assert ListMerger().merge(OUTPUTS, PLAN).samples == [
        {"sample_id": 10, "logprobs": [-10.0], "token_loss": [1.0]},
        {"sample_id": 11, "logprobs": [], "token_loss": []},
        {"sample_id": 12, "logprobs": [-12.0, -12.0], "token_loss": [0.0, 2.0]},
    ]


def test_fill_gives_every_response_token_a_value() -> None:
    assert ListMerger(fill=0.5).merge(OUTPUTS, PLAN).samples == [
        {"sample_id": 10, "logprobs": [0.5, -10.0], "token_loss": [0.5, 1.0]},
        {"sample_id": 11, "logprobs": [0.5], "token_loss": [0.5]},
        {"sample_id": 12, "logprobs": [-12.0, 0.5, -12.0], "token_loss": [0.0, 0.5, 2.0]},
    ]


def test_without_fill_it_is_the_list_of_any_batch_output() -> None:
    merged = ListMerger().merge(OUTPUTS, PLAN)
    assert merged.samples == BatchOutput.to_list(merged)


def test_values_are_plain() -> None:
    (first, *_) = ListMerger().merge(OUTPUTS, PLAN).samples
    assert [type(first["sample_id"]), type(first["logprobs"]), type(first["logprobs"][0])] == [int, list, float]


def test_without_per_token_outputs_every_sample_still_has_its_dict() -> None:
    outputs = [output_of(0, [12, 10], [3, 2], [[], []], fields=False), output_of(1, [11], [1], [[]], fields=False)]
    for fill in (None, 0.0):
        assert ListMerger(fill).merge(outputs, PLAN).samples == [{"sample_id": 10}, {"sample_id": 11}, {"sample_id": 12}]


def test_dicts_are_made_when_asked_for_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging makes no list of values: one whose making fails can be merged. Afterwards the same list is given every time."""
    merged = ListMerger(fill=0.0).merge(OUTPUTS, PLAN)
    with monkeypatch.context() as patch:
        patch.setattr(BatchOutput, "on_actions", None)
        again = ListMerger(fill=0.0).merge(OUTPUTS, PLAN)
        with pytest.raises(TypeError):
            _ = again.samples
    assert merged.samples is merged.samples is merged.to_list()


def test_it_travels() -> None:
    merged = ListMerger().merge(OUTPUTS, PLAN)
    wanted = merged.samples
    arrived = pickle.loads(pickle.dumps(merged))
    assert isinstance(arrived, ListedOutput)
    assert arrived.samples == wanted
