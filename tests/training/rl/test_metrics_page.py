"""docs/reference/rl-metrics.md lists exactly the metrics that runs by reinforcement write."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rl_runs import BESIDE_TRAINING

from skyrl_engine.config import load, resolve
from skyrl_engine.contracts import AdvantageOutput, Metric
from skyrl_engine.contracts.kinds.advantage import as_advantage_output
from skyrl_engine.errors import ContractError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.advantages.batches import DrawnRows, DrawnSample, Token
from skyrl_engine.testing.rollout_cases import plain_group
from skyrl_engine.training.rl.evaluation import evaluation_metrics
from skyrl_engine.training.rl.metrics import rollout_metrics
from skyrl_engine.training.rl.run import run_rl

DOCS = Path(__file__).parents[3] / "docs" / "reference"
PAGE = (DOCS / "rl-metrics.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \|[^|]*\| .+ \|$", PAGE, re.MULTILINE)
OF_LOSSES = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^- Metrics? (.+)$", (DOCS / "losses.md").read_text(), re.MULTILINE))))


def matches(row: str, name: str) -> bool:
    """A row's `<word>` stands for any name, its `<k>` and `<n>` for a number, its `<metric>` for a name with slashes in it; what holds of an
    evaluation holds of one environment's too.
    """
    words = {"k": r"\d+", "n": r"\d+", "metric": r"[\w/-]+"}
    pattern = re.sub(r"<(\w+)>", lambda match: words.get(match.group(1), r"[\w-]+"), re.escape(row))
    return re.fullmatch(pattern.replace("evaluation/", r"evaluation/(?:\w[\w-]*/)?"), name) is not None


def test_the_page_lists_exactly_what_runs_write(tables_of: Callable[..., dict[str, Any]]) -> None:
    """One run in which attempts fail, groups are dropped, the reference is read and held-out tasks are attempted, and rollouts with parts."""
    tables = tables_of("run", preset="reinforce_pp", environment={"failing": True})
    tables["environments"].append({**tables["environments"][0], "failing": False})
    lost = (
        "rollouts.min_group_size=3",
        "rollouts.max_failure_share=1.0",
        "rl.steps=2",
        "rl.groups=8",
        "rl.missing_eos_penalty=0.5",
    )
    evaluated = ("evaluation.every=1", "evaluation.samples=2", "evaluation.tasks=2")
    run = run_rl(resolve(load(tables, [*lost, *evaluated])))
    records = list(read_metrics(run.directory / "metrics.jsonl"))
    written = {name for record in records if record["kind"] in ("step", "evaluation") for name in record["metrics"]}
    parts = plain_group(0, rewards=(1.0, 0.0), parts={"form": 0.5}, metrics={"judge/requests": 1.0})
    written |= set(rollout_metrics([parts], [parts], ["spell"])) | set(evaluation_metrics([parts], ["spell"], seed=0))
    # of evaluations with attempts that fail, which test_evaluation.py holds
    written.add("evaluation/failed")
    # of runs with [[rl.reward_models]], which test_reward_model.py holds
    written |= {f"reward/model/judge/{name}" for name in ("mean", "std", "min", "max")}
    # of runs with [teacher], which test_teacher.py holds
    written.add("teacher/divergence")
    # of rows of trees, which test_rl_run.py holds
    written.add("shared_share")
    # of runs with rl.staleness, which test_sampling_beside_training.py holds
    written |= BESIDE_TRAINING
    # of runs with [rl.entropy], which test_entropy_control.py holds
    written.add("policy/entropy_coef")
    # of runs with rl.pairs, which test_pairs.py holds
    written |= {"rollout/pairs", "rollout/tied", "reward/pair_margin"}
    # of compiled layers, which test_compiled_run.py holds
    written.add("compile_seconds")
    assert [record["kind"] for record in records].count("evaluation") == 2
    undefined = {name for name in written - OF_LOSSES if not any(matches(row, name) for row in ROWS)}
    assert undefined == set(), "docs/reference/rl-metrics.md lacks these"
    unwritten = {row for row in ROWS if not any(matches(row, name) for name in written)}
    assert unwritten == set(), "docs/reference/rl-metrics.md has these, and no run writes them"
    assert len(ROWS) == len(set(ROWS))


def test_the_loss_of_several_epochs_is_their_mean(tables_of: Callable[..., dict[str, Any]]) -> None:
    """The entropy term says the same twice: as a mean over tokens, and as its part of the objective."""
    term = 'loss.terms=[{use="entropy", coef=1.0}]'
    tables = tables_of("run")
    run = run_rl(resolve(load(tables, ["rl.epochs=2", "rl.mini_batches=3", "rl.steps=1", "reducer.use=token_mean", term])))
    (step,) = (record for record in read_metrics(run.directory / "metrics.jsonl") if record["kind"] == "step")
    metrics = step["metrics"]
    assert metrics["objective/entropy"] == pytest.approx(-metrics["entropy/entropy"], rel=0.01)
    assert metrics["loss"] == pytest.approx(metrics["objective/entropy"] + metrics["objective/ppo"])
    assert metrics["samples"] == 2 * 9


def test_an_estimator_gives_its_metrics_names_of_their_own() -> None:
    batch = DrawnRows((DrawnSample(0, 0, 0, 0, True, (Token(1.0, 1.0),)),)).batch()
    for metrics in ({"loss": Metric.sum(1.0)}, {"reward/mean": Metric.sum(1.0)}, {"baseline": 1.0}):
        with pytest.raises(ContractError, match="mine returned"):
            as_advantage_output("mine", AdvantageOutput(np.zeros(1), metrics=metrics), batch, returns=False)
    kept = {"baseline": Metric.mean(3.0, 2)}
    assert as_advantage_output("mine", AdvantageOutput(np.zeros(1), metrics=kept), batch, returns=False).metrics == kept
