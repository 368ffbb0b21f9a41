"""Evaluations: which tasks are held out, and what their attempts say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from rl_runs import Rl, Seen, steps_of, weights_of

from skyrl_engine.contracts.kinds.environment import Task
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import Owner
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.rollout_cases import plain_group
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.rl.evaluation import evaluation_metrics, tasks_of
from skyrl_engine.training.rl.run import run_rl


def part(count: int) -> Any:
    own = [Task(str(number), prompt_ids=(1,)) for number in range(count)]
    product = SimpleNamespace(tasks=lambda split: own if split == "eval" else [])
    return BoundPlugin(product, Owner("sums", "Correct it"), "environments[0]", "sums")


@pytest.mark.parametrize(
    ("counts", "wanted", "taken"), [((9,), 4, [4]), ((9, 9), 5, [3, 2]), ((1, 9), 6, [1, 3]), ((0, 0), 5, [0, 0])]
)
def test_environments_share_what_is_held_out(counts, wanted, taken) -> None:
    found = tasks_of([part(count) for count in counts], wanted)
    assert [[number for number, _ in found].count(place) for place in range(len(counts))] == taken
    assert [task.key for number, task in found if number == 0] == [str(key) for key in range(taken[0])]


def test_rewards_and_chances_of_success() -> None:
    groups = [plain_group(0, rewards=(1.0, 0.0, 0.0, 1.0)), plain_group(1, rewards=(0.0, 0.0, 0.0, 1.0), environment="sums")]
    metrics = evaluation_metrics(groups, ["spell", "sums"], seed=0)
    assert metrics["evaluation/avg@4"] == 0.375
    assert metrics["evaluation/avg@4_low"] <= 0.375 <= metrics["evaluation/avg@4_high"]
    assert metrics["evaluation/pass@1"] == 0.375
    assert metrics["evaluation/pass@2"] == pytest.approx((5 / 6 + 0.5) / 2)
    assert metrics["evaluation/pass@4"] == metrics["evaluation/pass@4_low"] == metrics["evaluation/pass@4_high"] == 1.0
    assert (metrics["evaluation/pass@1_low"], metrics["evaluation/pass@1_high"]) == (0.25, 0.5), "tasks are drawn, not attempts"
    assert (metrics["evaluation/spell/avg@4"], metrics["evaluation/sums/avg@4"]) == (0.5, 0.25)
    assert evaluation_metrics([], ["spell"], seed=0) == {}


def test_a_failed_attempt_is_a_wrong_one() -> None:
    group = plain_group(0, rewards=(1.0, 1.0))
    broken = evolve(group.trajectories[1], status="failed", cause="hung", success=None)
    metrics = evaluation_metrics([evolve(group, trajectories=(group.trajectories[0], broken))], ["spell"], seed=0)
    assert (metrics["evaluation/avg@2"], metrics["evaluation/pass@1"], metrics["evaluation/pass@2"]) == (0.5, 0.5, 1.0)
    assert metrics["evaluation/failed"] == 0.5
    assert "evaluation/failed" not in evaluation_metrics([group], ["spell"], seed=0)


def test_an_evaluation_changes_no_training(rl: Rl, seen: Seen) -> None:
    plain = run_rl(rl("plain", "rl.steps=2")).directory
    looked = run_rl(
        rl("looked", "rl.steps=2", "evaluation={every=1, at_start=true, samples=3, tasks=2, temperature=1.0}")
    ).directory
    assert weights_of(plain) == weights_of(looked)
    evaluations = [record for record in read_metrics(looked / "metrics.jsonl") if record["kind"] == "evaluation"]
    assert [record["step"] for record in evaluations] == [0, 1, 2]
    assert {"evaluation/avg@3", "evaluation/pass@1", "evaluation/pass@3"} <= evaluations[0]["metrics"].keys()
    assert evaluations[0]["metrics"] != evaluations[2]["metrics"], "the weights moved"
    assert len(steps_of(looked)) == 2


@pytest.mark.nightly
def test_the_best_checkpoint_is_exported_and_the_sampler_keeps_its_weights(rl: Rl, tmp_path: Path) -> None:
    """With rewards that hardly differ the first evaluation stays the best one, and the run ends out of patience, also beside sampling."""
    best = "evaluation={every=1, samples=3, tasks=1, best='evaluation/avg@3', patience=1, min_delta=10.0}"
    result = run_rl(rl("run", "rl.steps=4", "rl.staleness=1", "checkpoint.keep=1", best))
    scores = {
        record["step"]: record["metrics"]["evaluation/avg@3"]
        for record in read_metrics(result.directory / "metrics.jsonl")
        if record["kind"] == "evaluation"
    }
    assert result.step == 2, "the first evaluation is an improvement, the second one is none by 10"
    assert result.best_step == max(scores, key=scores.__getitem__)
    export_checkpoint(result.directory, tmp_path / "model", "best")
    assert weights_of(result.directory) == weights_of(tmp_path)
