"""Recorded rollouts as training data: a loss of one's own that needs columns, groups that stay whole, and numbers checked from outside."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl_engine.cli import app
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import DataError, UnsupportedError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.sft.trainer import plan_sft, run_sft

Configure = Callable[..., ResolvedConfig]

LOSS = """
from attrs import define
from skyrl_engine import LossOutput, Metric, loss

@define
class ClipConfig:
    clip: float = 0.2

@loss(needs=("logprobs", "rollout_logprobs", "advantages"), config=ClipConfig)
def clipped(tokens, config):
    ratio = (tokens.logprobs - tokens.rollout_logprobs).exp()
    bounded = ratio.clamp(1 - config.clip, 1 + config.clip)
    values = -(ratio * tokens.advantages).minimum(bounded * tokens.advantages)
    seen = tokens.advantages
    return LossOutput(values, {"advantage": Metric.mean(seen.sum().item(), len(seen))})

@loss(needs=("values", "old_values", "returns"))
def critic(tokens, config):
    return 0.5 * (tokens.values - tokens.returns) ** 2 + 0.0 * tokens.old_values
"""


@pytest.fixture(scope="module")
def model(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' model without dropout, so that a step can be computed a second way."""
    directory = tmp_path_factory.mktemp("rollouts") / "model"
    shutil.copytree(material / "model", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    return directory


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    """24 rollouts to 6 prompts in groups of 4, scattered over the file; some columns per token, some per sample."""
    draw = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(24):
        response = draw.integers(3, 29, draw.integers(2, 6)).tolist()
        rows.append(
            {
                "group_ids": f"prompt-{number % 6}",
                "prompt_ids": [3 + number % 6, 4, 5],
                "response_ids": response,
                "loss_mask": [1] * (len(response) - 1) + [number % 2],
                "logprobs": draw.normal(-3, 0.5, len(response)).round(3).tolist(),
                "advantages": draw.normal(0, 1, len(response)).round(3).tolist() if number % 3 else float(number),
                "rewards": number / 10,
                "returns": 0.5,
                "old_values": [0.0] * (3 + len(response)),
            }
        )
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_loss.py").write_text(LOSS)
    return path


def expected_loss(model: Path, rows: list[Mapping[str, Any]]) -> float:
    """Clipped policy loss, mean over groups of each group's mean over its tokens: row by row on whole logits."""
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    groups: dict[str, list[float]] = {}
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            logprobs = network(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        for place, token in enumerate(response):
            if not row["loss_mask"][place]:
                continue
            advantages = row["advantages"]
            advantage = advantages[place] if isinstance(advantages, list) else advantages
            ratio = float(torch.exp(logprobs[len(prompt) + place - 1, token] - row["logprobs"][place]))
            value = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            groups.setdefault(row["group_ids"], []).append(value)
    return float(np.mean([np.mean(values) for values in groups.values()]))


def steps(run: Path) -> list[dict[str, Any]]:
    return [record["metrics"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"]


def test_sft_with_a_loss_from_a_file_on_recorded_rollouts(
    model: Path, rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line, end to end; the loss of the first step and the columns' mean against a computation of its own."""
    monkeypatch.chdir(tmp_path)
    arguments = [
        *("sft", "--model", str(model), "--data", str(rollouts), "--loss", "./my_loss.py:clipped", "--reducer", "group_mean"),
        *("--steps", "3", "--batch-size", "24", "--micro-batch-rows", "5", "--output", "run", "--learning-rate", "0.01"),
        *("data.cache=./cache", "run.device=cpu", "--quiet"),
    ]
    assert app.main(arguments) == 0
    first, _, last = steps(tmp_path / "run")
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert first["loss"] == pytest.approx(expected_loss(model, rows), rel=1e-5)  # float32 sums in another order
    assert last["loss"] < first["loss"]
    carrying = sum(sum(row["loss_mask"]) for row in rows)
    total = sum(
        sum(
            np.array(row["loss_mask"]) * (np.array(row["advantages"]) if isinstance(row["advantages"], list) else row["advantages"])
        )
        for row in rows
    )
    assert first["loss_tokens"] == carrying
    assert first["advantage"] == pytest.approx(total / carrying, rel=1e-6)
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["data"]["train"]["columns"] == ["advantages", "rollout_logprobs"], "what the loss needs, and nothing else"
    assert manifest["data"]["train"]["format"] == "rollouts"


def test_the_preview_reads_what_the_loss_will(
    model: Path, rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "data",
        "preview",
        "--model",
        str(model),
        "--data",
        str(rollouts),
        "data.cache=./cache",
        "loss.use=./my_loss.py:critic",
    ]
    assert app.main(arguments) == 0
    lines = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    assert {"column returns     0.5 to 0.5, mean 0.5", "column old_values  0 to 0, mean 0", "groups             6"} <= lines
    assert app.main([*arguments, "--json", "--quiet"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [column["name"] for column in seen["columns"]] == ["old_values", "returns"]
    assert seen["groups"] == 6
    assert seen["counts"]["from_cache"]


def test_groups_stay_whole_in_every_mini_batch_and_a_resume_goes_on(
    configure: Configure, model: Path, rollouts: Path, tmp_path: Path
) -> None:
    """Mini-batches of 10 out of groups of 4 hold 8 or 12 samples."""
    tables = {
        "model": {"path": str(model)},
        "data": {"train": str(rollouts), "eval": None, "eval_fraction": 0.1},
        "loss": {"use": f"{tmp_path}/my_loss.py:clipped"},
        "reducer": {"use": "group_mean"},
        "training": {"steps": 5, "batch_size": 10, "micro_batch_rows": 3},
        "evaluation": {"every": 5},
    }
    whole = run_sft(configure("whole", **tables))
    metrics = steps(whole.directory)
    assert [record["samples"] for record in metrics] == [8, 12, 8, 12, 8]
    evaluation = [record for record in read_metrics(whole.directory / "metrics.jsonl") if record["kind"] == "evaluation"]
    assert evaluation[0]["metrics"]["samples"] == 4, "one whole group is held out"
    run_sft(configure("parts", **{**tables, "training": {**tables["training"], "steps": 3}}))
    run_sft(configure("parts", **tables), resume=True)
    resumed = steps(tmp_path / "parts")
    assert [record["samples"] for record in resumed[3:]] == [12, 8]


def test_a_critic_trains_its_head_on_recorded_returns(configure: Configure, model: Path, rollouts: Path, tmp_path: Path) -> None:
    """All returns are 0.5 and the head starts at zero: the first loss is 0.5 * 0.25 at every token."""
    tables = {
        "data": {"train": str(rollouts), "eval": None},
        "loss": {"use": f"{tmp_path}/my_loss.py:critic"},
        "training": {"steps": 8},
    }
    result = run_sft(configure(**tables, model={"path": str(model), "value_head": True}))
    metrics = steps(result.directory)
    assert metrics[0]["loss"] == pytest.approx(0.125, rel=1e-6)
    assert metrics[-1]["loss"] < 0.05
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, result.directory / "model"))
    assert torch.equal(before.lm_head.weight, after.lm_head.weight), "no loss reads log-probabilities"
    export_checkpoint(result.directory, tmp_path / "exported")
    exported, written = (load_file(path / "model.safetensors") for path in (tmp_path / "exported", result.directory / "model"))
    assert written["score.weight"].any()
    assert exported.keys() == written.keys()
    assert all(torch.equal(exported[name], written[name]) for name in written)
    with pytest.raises(UnsupportedError, match="needs the model's score 'values', and the model has no value head") as caught:
        plan_sft(configure("without", **tables, model={"path": str(model)}))
    assert caught.value.remedy == "Set model.value_head = true"


def test_what_the_rollouts_lack_is_refused_while_planning(
    configure: Configure, model: Path, rollouts: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    del rows[5]["advantages"]
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = {"data": {"train": str(rollouts), "eval": None}, "loss": {"use": f"{tmp_path}/my_loss.py:clipped"}}
    with pytest.raises(
        DataError, match=r"sample 5 \(.*rollouts.jsonl line 6\) has no column 'advantages', which .*clipped.* needs"
    ):
        plan_sft(configure(**tables, model={"path": str(model)}))
    del tables["loss"]
    with pytest.raises(DataError, match=r"a group of 4 samples does not fit a mini-batch of training.batch_size = 3"):
        plan_sft(configure(**tables, model={"path": str(model)}, training={"batch_size": 3}))
