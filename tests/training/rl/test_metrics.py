"""Metrics of rollouts, against numbers worked out by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from rl_runs import Seen, steps_of

from skyrl_engine.config import load, resolve
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.rollout.columns import Overlong
from skyrl_engine.testing.rollout_cases import plain_group
from skyrl_engine.training.rl.evaluation import evaluation_metrics
from skyrl_engine.training.rl.metrics import rollout_metrics
from skyrl_engine.training.rl.run import run_rl


def test_rewards_successes_lengths_and_drops() -> None:
    first = plain_group(0, rewards=(1.0, 0.0, 0.0, 2.0), parts={"form": 0.5})
    second = plain_group(1, rewards=(0.0, 0.0, 0.0, 0.0), tokens=5, status="truncated", stops=("length",), tool_problems=1)
    dropped = plain_group(2, rewards=(4.0, 4.0), dropped="zero_variance")
    metrics = rollout_metrics([first, second], [first, second, dropped], ["spell"])
    assert metrics == {
        "reward/mean": 0.375,
        "reward/std": pytest.approx(0.6959705, rel=1e-6),
        "reward/min": 0.0,
        "reward/max": 2.0,
        "reward/all_mean": pytest.approx(1.1),
        "reward/part/form": 0.5,
        "rollout/tokens_mean": 4.0,
        "rollout/tokens_max": 5.0,
        "rollout/turns_mean": 1.0,
        "rollout/truncated": 0.5,
        "rollout/tool_problems": 0.5,
        "rollout/stopped_by/stop": 0.5,
        "rollout/stopped_by/length": 0.5,
        "rollout/success": 0.25,
        "rollout/pass@1": 0.25,
        "rollout/pass@4": 0.5,
        "rollout/zero_variance": pytest.approx(2 / 3),
        "rollout/dropped/zero_variance": pytest.approx(1 / 3),
        "rollout/failed": 0.0,
    }


def test_attempts_vote_by_their_answers() -> None:
    def answer_group(ticket: int, rewards: tuple[float, ...], answers: tuple[str | None, ...]) -> Group:
        group = plain_group(ticket, rewards=rewards)
        info: list[dict[str, str]] = [{} if answer is None else {"answer": answer} for answer in answers]
        voted = [evolve(trajectory, info=own) for trajectory, own in zip(group.trajectories, info, strict=True)]
        return evolve(group, trajectories=tuple(voted))

    right, wrong = answer_group(0, (1.0, 1.0, 0.0), ("7", "7", "8")), answer_group(1, (1.0, 0.0, 0.0), ("7", "8", "8"))
    silent, small = answer_group(2, (1.0, 1.0, 1.0), (None, None, None)), answer_group(3, (1.0, 1.0), ("7", "7"))
    groups = [right, wrong, silent, small]
    metrics = rollout_metrics(groups, groups, ["spell"])
    assert metrics["rollout/maj@3"] == pytest.approx(1 / 3), "of the groups of three; who says nothing is wrong"
    assert "rollout/maj@2" not in metrics
    assert not any("maj@" in name for name in rollout_metrics([silent], [silent], ["spell"]))
    assert evaluation_metrics([right, wrong], ["spell"], seed=0)["evaluation/maj@3"] == 0.5


def test_failed_attempts_are_counted_and_nowhere_else() -> None:
    group = plain_group(0, rewards=(3.0, 1.0))
    broken = evolve(group.trajectories[1], status="failed", cause="hung")
    metrics = rollout_metrics([evolve(group, trajectories=(group.trajectories[0], broken))], [group], ["spell"])
    assert metrics["reward/mean"] == 3.0
    both = evolve(group, trajectories=(group.trajectories[0], broken))
    assert rollout_metrics([both], [both], ["spell"])["rollout/failed"] == 0.5
    assert rollout_metrics([both], [both], ["spell"])["reward/all_mean"] == 3.0


def test_several_environments_are_told_apart() -> None:
    groups = [plain_group(0, rewards=(1.0, 3.0)), plain_group(1, rewards=(5.0, 5.0), environment="sums")]
    metrics = rollout_metrics(groups, groups, ["spell", "sums", "silent"])
    assert (metrics["reward/spell/mean"], metrics["reward/sums/mean"]) == (2.0, 5.0)
    assert "reward/silent/mean" not in metrics
    judged = [plain_group(ticket, rewards=(0.0, 1.0, 1.0)) for ticket in range(2)]
    other = plain_group(2, rewards=(0.0, 0.0, 0.0), environment="sums")
    groups = [*judged, other]
    metrics = rollout_metrics(groups, groups, ["spell", "sums"])
    assert (metrics["rollout/spell/success"], metrics["rollout/sums/success"]) == (pytest.approx(2 / 3), 0.0)
    assert (metrics["rollout/spell/pass@1"], metrics["rollout/spell/pass@3"]) == (pytest.approx(2 / 3), 1.0)
    assert (metrics["rollout/sums/pass@3"], metrics["rollout/pass@3"]) == (0.0, pytest.approx(2 / 3))
    assert "rollout/silent/success" not in metrics
    assert "reward/spell/mean" not in rollout_metrics(groups, groups, ["spell"])


def test_nothing_trained_has_no_rewards() -> None:
    assert rollout_metrics([], [], ["spell"]) == {
        "reward/all_mean": 0.0,
        "rollout/zero_variance": 0.0,
        "rollout/failed": 0.0,
    }


def test_rewards_are_those_that_are_trained_on() -> None:
    long = plain_group(0, rewards=(3.0, 3.0), tokens=6)
    cut = plain_group(1, rewards=(2.0,), tokens=6, status="truncated")
    soft = Overlong(start=4, end=8, penalty=1.0)
    metrics = rollout_metrics([long, cut], [long, cut], ["spell"], truncated="zero_reward", overlong=soft)
    # half of the way from 4 to 8 tokens
    assert (metrics["reward/max"], metrics["reward/min"]) == (2.5, -0.5)
    assert metrics["reward/mean"] == metrics["reward/all_mean"] == pytest.approx(1.5)
    assert metrics["reward/part/overlong"] == -0.5
    ended = plain_group(2, rewards=(1.0,), stops=("length", "eos"))
    cut = plain_group(1, rewards=(2.0, 2.0), status="truncated", stops=("eos", "length"))
    punished = rollout_metrics([ended, cut], [ended, cut], ["spell"], missing_eos_penalty=0.75)
    assert (punished["reward/max"], punished["reward/min"], punished["reward/all_mean"]) == (1.25, 1.0, pytest.approx(3.5 / 3))
    assert (punished["rollout/missing_eos"], punished["reward/part/missing_eos"]) == (pytest.approx(2 / 3), -0.5)
    cut = plain_group(1, rewards=(2.0,), tokens=6, status="truncated")
    untouched = rollout_metrics([long, cut], [long, cut], ["spell"])
    assert untouched["reward/mean"] == pytest.approx(8 / 3)
    assert "reward/part/overlong" not in untouched


def test_the_loss_of_an_environment_is_the_mean_over_its_own_tokens(tables_of: Callable[..., dict[str, Any]], seen: Seen) -> None:
    """At the first optimizer step the ratio is 1, so that a token's loss is minus its advantage."""
    tables = tables_of("run", preset="grpo")
    tables["environments"] = [{**tables["environments"][0], "turns": 1}, tables["environments"][0]]
    options = (
        "rl.steps=1",
        "rl.groups=6",
        "reducer.use=token_mean",
        "rl.mini_batches=1",
        "rl.epochs=1",
    )
    (record,) = steps_of(run_rl(resolve(load(tables, options))).directory)
    columns = seen.plans[1].columns
    environment = np.repeat(columns.sample_values["environment"], columns.lengths.actions)
    scored = columns.loss_weight != 0
    for number, name in enumerate(("world_1", "world_2")):
        own = scored & (environment == number)
        assert own.any()
        expected = -columns.columns["advantages"][own].astype(np.float64).mean()
        assert record["metrics"][f"loss/{name}"] == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert record["metrics"][f"sample_share/{name}"] == np.mean(columns.sample_values["environment"] == number)
