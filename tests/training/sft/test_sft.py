"""Supervised runs from configuration to run directory."""

import json
import math
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_engine import hookimpl
from skyrl_engine.config import ResolvedConfig, from_dict, load, resolve
from skyrl_engine.contracts.kinds.observer import SessionFinished
from skyrl_engine.contracts.values.outputs import ENGINE_METRICS
from skyrl_engine.errors import ConfigError, DataError, EngineError, PluginBrokenError, UnsupportedError
from skyrl_engine.run.metrics import engine_share, read_metrics
from skyrl_engine.training.sft.trainer import plan_sft, run_sft

Configure = Callable[..., ResolvedConfig]


def records(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == kind]


class Facts:
    """An observer of the embedding program: adds to the manifest and keeps the last event."""

    def __init__(self) -> None:
        self.finished: SessionFinished | None = None

    @hookimpl
    def skyrl_engine_manifest_extra(self) -> dict[str, Any]:
        return {"experiment": "sums"}

    @hookimpl
    def skyrl_engine_session_finished(self, event: SessionFinished) -> None:
        self.finished = event


def test_a_run_learns_and_leaves_a_complete_directory(configure: Configure) -> None:
    facts = Facts()
    chosen = {"collator": {"use": "padded"}, "model": {"dtype": "float32"}, "training": {"micro_batch_tokens": "none"}}
    resolved = configure(evaluation={"at_start": True, "every": 4}, **chosen)
    result = run_sft(resolved, observers=[facts])
    run = result.directory
    assert {entry.name for entry in run.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "model",
        "run.json",
        "run.log",
        "samples.json",
    }
    assert result.step == 10
    assert result.stopped_by is None
    assert facts.finished == SessionFinished(10)

    steps = records(run, "step")
    assert [record["step"] for record in steps] == list(range(1, 11))
    assert [record["metrics"]["samples"] for record in steps] == [8, 8, 7] * 3 + [8]
    assert steps[-1]["metrics"]["loss"] < 0.8 * steps[0]["metrics"]["loss"]
    assert steps[2]["metrics"]["epoch"] == 1.0
    for record in steps:
        numbers = record["metrics"]
        assert set(numbers) == ENGINE_METRICS - {"evaluation_loss", "shared_share", "compile_seconds"}, (
            "the names that a loss is refused"
        )
        assert {"data", "plan", "reduce", "dispatch", "build", "objective", "model", "optimizer", "merge"} <= set(
            record["cpu_seconds"]
        )
        assert 0 <= engine_share(record["cpu_seconds"]) <= 1
        assert len(record["peak_bytes"]) == 1
        assert record["peak_bytes"][0] > 2**26, "torch alone takes more"
    assert "observe" in steps[1]["cpu_seconds"]
    assert steps[0]["metrics"]["learning_rate"] == pytest.approx(0.5e-2)  # warm-up over two steps

    evaluations = records(run, "evaluation")
    assert [record["step"] for record in evaluations] == [0, 4, 8, 10]
    assert evaluations[-1]["metrics"]["loss"] < evaluations[0]["metrics"]["loss"]
    assert evaluations[0]["metrics"].keys() == {"loss", "samples", "tokens", "loss_tokens", "padding_share"}
    assert evaluations[0]["metrics"]["samples"] == 13, "counts of both passes of 8 samples, added up"
    assert set(result.metrics) == ENGINE_METRICS - {"shared_share", "compile_seconds"}
    assert result.metrics["evaluation_loss"] == evaluations[-1]["metrics"]["loss"]
    assert result.metrics["loss"] == steps[-1]["metrics"]["loss"]

    assert [record["step"] for record in records(run, "checkpoint")] == [3, 6, 9, 10]
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["latest", "step-00000009", "step-00000010"]
    check_manifest(json.loads((run / "run.json").read_text()), resolved)
    assert resolve(load(run / "config.toml")).as_dict() == resolved.as_dict()


def check_manifest(manifest: Mapping[str, Any], resolved: ResolvedConfig) -> None:
    assert set(manifest["plugins"]) == {"collator", "loss", "reducer", "backend", "merger"}
    for kind, plugin in manifest["plugins"].items():
        record = resolved.plugins[kind].loaded.record
        assert (plugin["name"], plugin["distribution"], plugin["version"]) == (record.name, record.distribution, record.version)
        assert plugin["source"] == "distribution"
        assert len(plugin["sha256"]) == 64
    assert [observer["name"] for observer in manifest["observers"]] == ["metrics_jsonl"]
    assert resolve(from_dict(manifest["config"], "run.json")).as_dict() == resolved.as_dict()
    assert manifest["origins"]["training.batch_size"] == "test"
    assert manifest["origins"]["training.shuffle"] == "default"
    assert manifest["seeds"] == {"run": 5}
    assert manifest["world"] == {"launch": "inline", "ranks": 1, "dp": 1, "tp": 1, "cp": 1, "pp": 1}
    assert manifest["data"]["train"]["samples"] == 23
    assert len(manifest["data"]["train"]["sha256"]) == 64
    assert manifest["environment"]["libraries"]["torch"] == version("torch")
    assert manifest["extra"] == {"experiment": "sums"}
    (session,) = manifest["sessions"]
    assert (session["start_step"], session["end_step"], session["error"]) == (0, 10, None)


def test_the_evaluation_loss_is_the_token_mean_that_transformers_computes(configure: Configure, material: Path) -> None:
    """Against the model's own logits, sample by sample: nothing of the engine's batching, masking or weighing is on the other side."""
    result = run_sft(configure(evaluation={"at_start": True}, training={"steps": 2}, checkpoint={"at_end": True}))
    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    rows = [json.loads(line) for line in (material / "eval.jsonl").read_text().splitlines()]
    for directory, record in zip(
        (material / "model", result.directory / "model"), records(result.directory, "evaluation"), strict=True
    ):
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        total, count = 0.0, 0
        for row in rows:
            prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            response = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            with torch.no_grad():
                logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
            places = range(len(prompt) - 1, len(prompt) + len(response) - 1)
            total -= sum(float(logprobs[place, token]) for place, token in zip(places, response, strict=True))
            count += len(response)
        assert record["metrics"]["loss_tokens"] == count
        assert record["metrics"]["loss"] == pytest.approx(total / count, rel=1e-5)  # float32 sums in another order


def test_a_dry_run_plans_and_writes_no_directory(configure: Configure, tmp_path: Path) -> None:
    plan = plan_sft(configure(training={"steps": None, "epochs": 2.5}))
    assert not (tmp_path / "run").exists()
    assert (plan.steps_per_epoch, plan.total_steps, plan.batch_size) == (3, 8, 8)
    assert plan.train["samples"] == 23
    assert plan.evaluation is not None
    assert plan.evaluation["samples"] == 13
    assert plan.topology.world_size == 1
    assert plan.required == ("padded",)
    assert [(shape.rows, shape.samples) for shape in plan.micro_batches] == [(3, 3), (3, 3), (2, 2)]
    assert 0 <= plan.shape.padding_share < 1
    assert plan.plugins["loss"].startswith("skyrl-engine-losses:cross_entropy 0.")
    assert plan.observers[0].startswith("skyrl-engine:metrics_jsonl 0.")


LOCAL_LOSS = """
from skyrl_engine import loss

@loss(needs=("logprobs", {column!r}), reducers={reducers!r})
def mine(tokens, config):
    return -tokens.logprobs
"""


@pytest.mark.parametrize("go", [plan_sft, run_sft])
def test_a_loss_whose_column_is_missing_is_refused_while_planning(
    configure: Configure, tmp_path: Path, go: Callable[[ResolvedConfig], object]
) -> None:
    (tmp_path / "my_loss.py").write_text(LOCAL_LOSS.format(column="advantages", reducers=None))
    with pytest.raises(
        DataError, match=r"sample \d+ \(.*train.jsonl line \d+\) has no column 'advantages', which loss 'mine' of .* needs"
    ):
        go(configure(loss={"use": f"{tmp_path}/my_loss.py:mine"}))


def test_a_reducer_the_loss_excludes_is_refused_while_planning(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(LOCAL_LOSS.format(column="entropy", reducers=("sum",)))
    with pytest.raises(UnsupportedError, match="only with the reducers sum, not with token_mean"):
        plan_sft(configure(loss={"use": f"{tmp_path}/my_loss.py:mine"}))


def test_a_local_loss_is_recorded_by_its_hash(configure: Configure, tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(LOCAL_LOSS.format(column="entropy", reducers=None))
    result = run_sft(
        configure(loss={"use": f"{tmp_path}/my_loss.py:mine"}, training={"steps": 2}, checkpoint={"every": None, "at_end": False})
    )
    recorded = json.loads((result.directory / "run.json").read_text())["plugins"]["loss"]
    assert recorded["source"] == "file"
    assert recorded["path"] == f"{tmp_path}/my_loss.py"
    assert len(recorded["sha256"]) == 64
    assert not (result.directory / "checkpoints").exists()
    assert not (result.directory / "model").exists()


def test_a_second_run_in_the_directory_is_refused(configure: Configure) -> None:
    run_sft(configure(training={"steps": 2}))
    with pytest.raises(ConfigError, match="already holds a run"):
        run_sft(configure(training={"steps": 2}))


class Failing:
    @hookimpl
    def skyrl_engine_step_finished(self, event: Any) -> None:
        if event.step == 2:
            raise ValueError("tracker is down")


def test_a_failure_is_recorded_everywhere_and_raised(configure: Configure) -> None:
    facts = Facts()
    resolved = configure()
    with pytest.raises(PluginBrokenError, match="tracker is down"):
        run_sft(resolved, observers=[Failing(), facts])
    run = Path(resolved.config.run.directory or "")
    assert facts.finished is not None
    assert "tracker is down" in (facts.finished.error or "")
    (session,) = json.loads((run / "run.json").read_text())["sessions"]
    assert "tracker is down" in session["error"]
    assert session["end_step"] == 2
    assert "tracker is down" in records(run, "session_finished")[0]["error"]
    log = (run / "run.log").read_text()
    assert "Traceback" in log
    assert "ValueError: tracker is down" in log
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("flaw", ["* nan", "+ nan"], ids=["gradient", "loss alone"])
def test_what_is_not_finite_ends_the_run_with_the_checkpoint_before_it(configure: Configure, tmp_path: Path, flaw: str) -> None:
    (tmp_path / "my_loss.py").write_text(
        "from skyrl_engine import loss\n"
        "calls = []\n"
        "@loss(needs=('logprobs',))\n"
        "def mine(tokens, config):\n"
        "    calls.append(1)\n"
        "    nan = float('nan')\n"
        f"    return (-tokens.logprobs) {flaw} if len(calls) > 13 else -tokens.logprobs\n"
    )
    resolved = configure(loss={"use": f"{tmp_path}/my_loss.py:mine"})
    with pytest.raises(EngineError, match="not finite"):
        run_sft(resolved)
    run = Path(resolved.config.run.directory or "")
    assert (run / "checkpoints" / "latest").read_text() == "step-00000003\n"
    assert all(math.isfinite(record["metrics"]["loss"]) for record in records(run, "step"))
