"""Averages of weights against torch's own `AveragedModel` in float64, through backends on one rank and on two, and through a run's files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve

from skyrl_engine.modeling.weight_averages import WeightAverages
from skyrl_engine.testing.backends.average_promises import average_weights
from skyrl_engine.testing.backends.bench import Bench
from skyrl_engine.testing.backends.state_promises import train
from skyrl_engine.testing.backends.step_promises import SPEC
from skyrl_engine.testing.backends.subject import BackendCase, BackendSubject
from skyrl_engine.testing.subject import select_plugin

STEPS = 20


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as opened:
        yield opened


@pytest.mark.parametrize(
    ("plugin", "options", "layout"),
    [
        ("skyrl-engine-fsdp:fsdp", {}, "dp1"),
        pytest.param("skyrl-engine-fsdp:fsdp", {}, "dp2", marks=pytest.mark.nightly),
        pytest.param("skyrl-engine-megatron:megatron", {"distributed_optimizer": True}, "dp2", marks=pytest.mark.nightly),
        pytest.param("skyrl-engine-megatron:megatron", {}, "tp2", marks=pytest.mark.nightly),
    ],
)
def test_twenty_steps_in_float64(bench: Bench, tmp_path: Path, plugin: str, options: dict[str, object], layout: str) -> None:
    subject, case = BackendSubject(select_plugin("backend", plugin, options), bench, (layout,)), BackendCase(layout)
    with subject.open_ranks(case, optimizer=evolve(SPEC, ema_decay=0.9), dtype="float64") as ranks:
        course = [weights for _, weights in train(ranks, case, STEPS)]
        ranks.save(tmp_path)
    with subject.open_ranks(case, optimizer=None, dtype="float64") as ranks:
        ranks.load_averages(tmp_path)
        got = ranks.weights()[0]
    for name, due in average_weights(course, 0.9).items():
        assert got[name].dtype == np.float64
        assert np.array_equal(got[name], due), name
        assert not np.array_equal(due, course[-1][name])


def test_an_average_left_on_another_device_comes_back() -> None:
    averages, weight = WeightAverages(0.5), torch.ones(3)
    averages.update([weight])
    weight += 1
    averages.offload(torch.device("cpu"))
    averages.reload(torch.device("cpu"))
    averages.update([weight])
    assert averages.values[weight].tolist() == [1.5, 1.5, 1.5]
    averages.clear()
    averages.update([weight])
    assert averages.values[weight].tolist() == [2, 2, 2]
