"""Whole runs on one CUDA device, as users start them: what they choose by default, what they learn, turns on one device, and a kill."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rl_runs import kill_run, steps_of, write_world
from safetensors.numpy import load_file

from skyrl_engine.config import load, resolve
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.sft.trainer import run_sft
from skyrl_engine.workers.replicas import ReplicaHost

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
"""Heads that flash attention and FlexAttention take."""

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_world(tmp_path_factory.mktemp("world"), **WIDE)
    rows = [
        [{"role": "user", "content": "go " * (1 + number % 5)}, {"role": "assistant", "content": "on and " * (1 + number % 7)}]
        for number in range(24)
    ]
    (directory / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return directory


@pytest.fixture
def sft(world: Path, tmp_path: Path) -> Run:
    def run(name: str, *overrides: str) -> Path:
        tables = {
            "model": {"path": str(world / "model")},
            "data": {"train": str(world / "train.jsonl")},
            "training": {"steps": 6, "batch_size": 8},
            "optimizer": {"learning_rate": 1e-3},
            "evaluation": {"at_end": False},
            "run": {"directory": str(tmp_path / name), "device": "cuda", "seed": 5},
        }
        return run_sft(resolve(load(tables, list(overrides)))).directory

    return run


@pytest.fixture
def rl_tables(world: Path, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    return lambda name: {
        "trainer": "rl",
        "model": {"path": str(world / "model")},
        "rl": {"preset": "grpo", "steps": 3, "groups": 3, "group_size": 4, "max_tokens": 44, "max_prompt_tokens": 64},
        "environments": [{"use": f"{world / 'world.py'}:world"}],
        "rollouts": {"workers": 1, "retries": 0},
        "evaluation": {"at_end": False},
        "optimizer": {"learning_rate": 1e-4},
        "run": {"directory": str(tmp_path / name), "device": "cuda", "seed": 5},
    }


def losses(directory: Path) -> np.ndarray:
    return np.array([record["metrics"]["loss"] for record in steps_of(directory)])


def weights(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model" / "model.safetensors")


def recorded(directory: Path) -> dict[str, Any]:
    return tomllib.loads((directory / "config.toml").read_text())


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name].astype(np.float64) - other[name]).max()) for name in one)


def test_fine_tuning_learns_as_on_the_cpu(sft: Run, caplog: pytest.LogCaptureFixture) -> None:
    due = losses(sft("cpu", "run.device=cpu"))
    in_float32 = sft("float32", "model.dtype=float32")
    np.testing.assert_allclose(losses(in_float32), due, rtol=1e-3)
    chosen = sft("chosen")
    assert recorded(chosen)["model"]["dtype"] == "bfloat16"
    assert recorded(chosen)["training"]["micro_batch_tokens"] > 4096, "planned from the memory of the device"
    np.testing.assert_allclose(losses(chosen), due, rtol=3e-2)
    np.testing.assert_allclose(losses(sft("compiled", "model.compile=true")), due, rtol=3e-2)
    np.testing.assert_allclose(losses(sft("padded", "collator.use=padded")), due, rtol=3e-2)
    assert "one by one" not in caplog.text
    assert "run by run" not in caplog.text
    assert {array.dtype for array in weights(chosen).values()} == {np.dtype(np.float32)}
    assert due[-1] < due[0]


def test_reinforcement_samples_what_it_trains(rl_tables: Callable[[str], dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    run = run_rl(resolve(load(rl_tables("run"), []))).directory
    assert recorded(run)["model"]["dtype"] == "bfloat16"
    assert recorded(run)["collator"]["use"].endswith("tree")
    for record in steps_of(run):
        metrics = record["metrics"]
        print({name: metrics[name] for name in metrics if "gap" in name or name in ("loss", "grad_norm")})
        assert metrics["policy/gap_mean"] < 0.02
    assert "run by run" not in caplog.text
    exact = run_rl(resolve(load(rl_tables("exact"), ["model.dtype=float32"]))).directory
    assert max(record["metrics"]["policy/gap_max"] for record in steps_of(exact)) < 1e-3
    unshared = run_rl(resolve(load(rl_tables("unshared"), ["model.dtype=float32", "collator.use=packed"]))).directory
    assert largest_difference(weights(exact), weights(unshared)) < 1e-4


def test_turns_on_one_device(rl_tables: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks, which are this process, hold nothing on the device while the generator, a process of its own, samples."""
    held: list[int] = []
    call = ReplicaHost._call

    def note(self: ReplicaHost, method: str, *arguments: Any) -> None:
        call(self, method, *arguments)
        if method == "update":
            held.append(torch.cuda.memory_allocated())

    apart = run_rl(resolve(load(rl_tables("apart"), ["model.dtype=float32"]))).directory
    empty = torch.cuda.memory_allocated()
    monkeypatch.setattr(ReplicaHost, "_call", note)
    turns = ["model.dtype=float32", "generator.placement=process", "generator.share_devices=true"]
    shared = run_rl(resolve(load(rl_tables("shared"), turns))).directory
    assert len(held) >= 3
    print(f"while others sample: {held} bytes, {empty} before the run")
    assert max(held[1:]) <= empty + 2**22
    assert largest_difference(weights(shared), weights(apart)) < 1e-4


def test_a_run_that_is_killed_goes_on(rl_tables: Callable[[str], dict[str, Any]]) -> None:
    keys = ["model.dtype=float32", "checkpoint.every=1"]
    whole = run_rl(resolve(load(rl_tables("whole"), keys))).directory
    kill_run(rl_tables("parts"), keys, "learned", 2)
    parts = run_rl(resolve(load(rl_tables("parts"), keys)), resume=True).directory
    assert len(steps_of(parts)) == len(steps_of(whole)) == 3
    difference = largest_difference(weights(parts), weights(whole))
    print(f"killed and resumed: weights differ by {difference:.1e}")
    assert difference < 1e-4
