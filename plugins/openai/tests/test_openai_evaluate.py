"""`skyrl-engine evaluate` over an endpoint, with a reward that asks a judge; and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai_routes import Endpoint

from skyrl_engine.cli.app import main
from skyrl_engine.rollout.exported import read_rollouts

Served = tuple[str, Endpoint]

REWARD = """
from skyrl_engine.contracts import StepResult
from skyrl_engine_openai import Judge

judge = Judge("URL", "m", cache="CACHE", max_tokens=3)

def score(text, task):
    said = judge(f"Is {text} right?")
    return StepResult(len(text) / 10, metrics=said.metrics)
"""


def write_tasks(place: Path, url: str) -> list[str]:
    """Write tasks and a reward, and return the words of a command that name them."""
    (place / "r.py").write_text(REWARD.replace("URL", url).replace("CACHE", str(place / "judge.sqlite3")))
    (place / "tasks.jsonl").write_text("".join(json.dumps({"prompt": "go " * count}) + "\n" for count in range(1, 5)))
    lengths = ["--max-tokens", "8", "--set", "rl.max_prompt_tokens=64"]
    return ["--reward", f"{place / 'r.py'}:score", "--data", str(place / "tasks.jsonl"), *lengths]


def options(url: str, **more: Any) -> list[str]:
    table = {"use": "openai", "url": url, "model": "m", **more}
    return [word for name, value in table.items() for word in ("--set", f"generator.{name}={value}")]


@pytest.mark.parametrize("dialect", ["openai", "vllm"])
def test_an_endpoint_of_the_same_model_has_the_numbers_of_the_model(
    request: pytest.FixtureRequest,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dialect: str,
) -> None:
    """Greedy, over texts and over token ids, and without the model's weights. Attempts without log-probabilities can be written and read."""
    url, _ = request.getfixturevalue("plain" if dialect == "openai" else "like_vllm")
    weightless = tmp_path / "weightless"
    shutil.copytree(folder, weightless, ignore=shutil.ignore_patterns("*.safetensors"))
    command = [*write_tasks(tmp_path, url), "--set", "rollouts.workers=1", "--json"]
    if dialect == "vllm":
        (tmp_path / "r.py").write_text("def score(text, task):\n    return len(text) / 10\n")
    reports = []
    for name, model, words in (("hf", folder, []), ("endpoint", weightless, options(url, dialect=dialect))):
        for ending in ("jsonl", "parquet") if name == "endpoint" else ("jsonl",):
            output = tmp_path / f"{name}.{ending}"
            assert main(["evaluate", "--model", str(model), *command, *words, "--output", str(output)]) == 0, (
                capsys.readouterr().err
            )
            reports.append((json.loads(capsys.readouterr().out), list(read_rollouts(output))))
    (due, due_groups), *others = reports
    for report, groups in others:
        assert without_costs(report) == without_costs(due)
        for group, due_group in zip(groups, due_groups, strict=True):
            for attempt, due_attempt in zip(group.trajectories, due_group.trajectories, strict=True):
                assert attempt.token_ids.tolist() == due_attempt.token_ids.tolist()
                assert attempt.stops == due_attempt.stops
                assert np.isnan(attempt.logprobs).all()
                assert not np.isnan(due_attempt.logprobs).any()
    if dialect == "openai":
        costs = [attempt.metrics for _, groups in reports for group in groups for attempt in group.trajectories]
        assert {cost["judge/requests"] + cost["judge/cache_hits"] for cost in costs} == {1.0}
        assert sum(cost["judge/prompt_tokens"] for cost in costs[:4]) > 0
        assert [cost["judge/cache_hits"] for cost in costs[4:]] == [1.0] * 8
        assert due["metrics"]["evaluation/environment/judge/prompt_tokens/sum"] == sum(
            cost["judge/prompt_tokens"] for cost in costs[:4]
        )
        assert others[0][0]["metrics"]["evaluation/environment/judge/cache_hits/mean"] == 1.0


def without_costs(report: dict[str, Any]) -> dict[str, Any]:
    metrics = {name: value for name, value in report["metrics"].items() if "/judge/" not in name}
    return {**report, "metrics": metrics}


def test_training_is_refused_with_the_reason(
    plain: Served, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write_tasks(tmp_path, plain[0])
    command = ["rl", "--model", str(folder), *words, "--steps", "1", "--output", str(tmp_path / "run"), *options(plain[0])]
    assert main(command) != 0
    assert "takes no weights: it would go on sampling from a model that is not the trained one" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_endpoint_that_is_not_there_ends_the_evaluation_with_its_cause(
    plain: Served, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = options("http://127.0.0.1:9/v1", retries=0)
    assert main(["evaluate", "--model", str(folder), *write_tasks(tmp_path, plain[0]), *words]) == 4
    assert "the endpoint http://127.0.0.1:9/v1 cannot be reached" in capsys.readouterr().err


def test_an_endpoint_without_url_is_refused_by_the_key(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "--model", str(folder), *write_tasks(tmp_path, "http://127.0.0.1:9/v1"), "--set", "generator.use=openai"]
    assert main(command) == 2
    assert "url" in capsys.readouterr().err
