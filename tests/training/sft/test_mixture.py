"""Datasets with weights: shares are exact, every order is a function of (seed, epoch), and copies of a sample are samples of their own."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import offsets_of
from skyrl_engine.contracts.values.source_names import SOURCE
from skyrl_engine.data.dataset import separate_copies
from skyrl_engine.errors import CheckpointError, ConfigError, DataError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.mixture import DatasetMixture
from skyrl_engine.training.sft.order import Position, SampleOrder
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]
DATASETS = np.repeat(np.arange(3), [10, 30, 5])


def columns_of(datasets: np.ndarray, **ids: list[int]) -> SampleColumns:
    count = len(datasets)
    return SampleColumns.create(
        input_ids=np.ones(2 * count, dtype=np.int32),
        token_offsets=offsets_of([2] * count),
        action_offsets=offsets_of([1] * count),
        sample_values={SOURCE: datasets},
        **{name: np.asarray(values) for name, values in ids.items()},
    )


def order_of(stopping: str, *weights: float, **options: object) -> SampleOrder:
    return SampleOrder.of(
        columns_of(DATASETS),
        batch_size=4,
        seed=3,
        mix=lambda datasets, bundles: DatasetMixture.of(("a", "b", "c"), datasets, weights, stopping, bundles),  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_the_shares_of_the_weights_and_the_named_end(shuffle: bool) -> None:
    """All: 0.5 / 0.3 / 0.2 over 10, 30, 5 samples end with b, whose 30 are 0.3 of 100. First: with a, whose 10 are 0.5 of 20."""
    exhausted = order_of("all_exhausted", 5, 3, 2, shuffle=shuffle)
    assert np.bincount(DATASETS[exhausted.epoch(0)]).tolist() == [50, 30, 20]
    counts = Counter(exhausted.epoch(0).tolist())
    assert all(counts[sample] == times for sample, times in enumerate([5] * 10 + [1] * 30 + [4] * 5)), "passes are whole"
    first = order_of("first_exhausted", 5, 3, 1, shuffle=shuffle)
    assert np.bincount(DATASETS[first.epoch(0)]).tolist() == [10, 6, 2]
    later = Counter(np.concatenate([first.epoch(epoch) for epoch in range(5)]).tolist())
    assert [later[sample] for sample in range(45)] == [5] * 10 + [1] * 30 + [2] * 5, "epochs go on where the one before ended"
    without = order_of("all_exhausted", 1, 0, 1, shuffle=shuffle)
    assert np.bincount(DATASETS[without.epoch(0)]).tolist() == [10, 0, 10]


def test_the_order_is_a_function_of_seed_and_epoch_and_in_turn_without_shuffle() -> None:
    order = order_of("first_exhausted", 5, 3, 1)
    batches, position = [], order.start()
    while len(batches) < 12:
        chosen, position = order.mini_batch(position)
        batches.append(chosen.tolist())
    position, resumed = Position(0, 4), []
    while len(resumed) < 11:
        chosen, position = order_of("first_exhausted", 5, 3, 1).mini_batch(position)
        resumed.append(chosen.tolist())
    assert resumed == batches[1:]
    assert order.epoch(0).tolist() != evolve(order, seed=4).epoch(0).tolist()
    turns = DATASETS[order_of("first_exhausted", 2, 2, 1, shuffle=False).epoch(0)]
    assert turns.tolist()[:5] == [0, 1, 2, 0, 1], "the nearest to equal distances"


def test_groups_stay_whole_and_are_refused_where_they_cannot() -> None:
    units = np.repeat(np.arange(6), 2)
    mix = {"weights": (1.0, 3.0), "stopping": "all_exhausted"}

    def order(datasets: list[int], ids: np.ndarray) -> SampleOrder:
        return SampleOrder.of(
            columns_of(np.asarray(datasets), unit_ids=ids.tolist()),
            batch_size=4,
            mix=lambda own, bundles: DatasetMixture.of(("a", "b"), own, mix["weights"], mix["stopping"], bundles),  # type: ignore[arg-type]
        )

    pairs = order([0] * 8 + [1] * 4, units)
    assert (pairs.samples, pairs.mixture and pairs.mixture.draws) == (32, (4, 12))
    assert all((units[pairs.epoch(0)].reshape(-1, 2) == units[pairs.epoch(0)].reshape(-1, 2)[:, :1]).ravel())
    with pytest.raises(DataError, match="a group has samples in a and in b"):
        order([0] * 7 + [1] * 5, units)
    with pytest.raises(DataError, match="have 1 to 3 samples"):
        order([0] * 7 + [1] * 5, np.array([0, 0, 0, *range(1, 10)]))
    with pytest.raises(DataError, match=r"the dataset b has a weight in data\.weights and no sample"):
        order([0] * 12, units)


def test_copies_of_a_sample_have_ids_of_their_own() -> None:
    columns = columns_of(np.zeros(4, dtype=np.int64), unit_ids=[7, 7, 9, 9], group_ids=[0, 0, 0, 0])
    chosen = np.array([2, 3, 0, 1, 2, 3, 2, 3])
    taken = separate_copies(columns.take(chosen), chosen)
    assert len(set(taken.sample_ids.tolist())) == 8
    assert taken.unit_ids[:4].tolist() == [9, 9, 7, 7]
    assert Counter(taken.unit_ids.tolist()) == dict.fromkeys(set(taken.unit_ids.tolist()), 2)
    assert (taken.unit_ids[4], taken.unit_ids[6]) == (taken.unit_ids[5], taken.unit_ids[7])
    assert taken.group_ids[:4].tolist() == [0] * 4
    assert len(set(taken.group_ids.tolist())) == 3
    once = columns.take(np.array([1, 0]))
    assert separate_copies(once, np.array([1, 0])) is once


def test_a_run_draws_by_weights_resumes_exactly_and_refuses_others(configure: Configure, material: Path, tmp_path: Path) -> None:
    rows = (material / "train.jsonl").read_text().splitlines(keepends=True)
    for name, own in (("few", rows[:3]), ("many", rows[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(own))
    data = {"train": [str(tmp_path / "few.jsonl"), str(tmp_path / "many.jsonl")], "weights": [1, 1], "eval": None}
    whole = run_sft(configure("whole", data=data, training={"steps": 6})).directory
    steps = [record["metrics"] for record in read_metrics(whole / "metrics.jsonl") if record["kind"] == "step"]
    assert sum(step["sample_share/few"] for step in steps[:5]) == pytest.approx(2.5), (
        "an epoch of 40 draws, half of them of three rows"
    )
    half = run_sft(configure("half", data=data, training={"steps": 3}, checkpoint={"every": 3})).directory
    with pytest.raises(CheckpointError, match=r"other data.weights: an epoch took 20 and 20 draws"):
        run_sft(configure("half", data={**data, "weights": [1, 3]}, training={"steps": 6}), resume=True)
    run_sft(configure("half", data=data, training={"steps": 6}), resume=True)
    resumed = [record["metrics"] for record in read_metrics(half / "metrics.jsonl") if record["kind"] == "step"]
    names = ("sample_share/few", "token_share/few", "epoch", "loss_tokens")
    assert [[step[name] for name in names] for step in resumed] == [[step[name] for name in names] for step in steps]


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"weights": [0, 0]}, "add up to 0: no dataset is drawn from"),
        ({"weights": [1e308, 1e308]}, "whose sum is no finite number"),
        ({"weights": [1, -1]}, "a weight is a finite number of 0 or more"),
        ({"weights": [1]}, "are 1, and data.train names 2 datasets"),
        ({"stopping_strategy": "first_exhausted"}, "is not read without data.weights"),
    ],
)
def test_weights_that_cannot_be_are_refused(configure: Configure, keys: dict[str, object], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        configure(data={"train": ["a.jsonl", "b.jsonl"], "eval": None, **keys})
