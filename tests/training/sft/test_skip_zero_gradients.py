"""Fine-tuning on recorded rollouts whose advantages are data: those of 0 are computed without gradients."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.passes import Passes
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import run_sft
from skyrl_engine.workers.worker import Pass

OF_PASSES = ("tokens_per_second", "padding_share")


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    """24 rollouts, of which every third one has advantages of 0, another one a single advantage."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(24):
        response = draw.integers(3, 29, draw.integers(2, 6)).tolist()
        advantages = draw.normal(0, 1, len(response)) * (number % 3 > 0)
        if number % 3 == 1:
            advantages[1:] = 0
        rows.append({"prompt_ids": [3, 4, 5], "response_ids": response, "advantages": advantages.tolist(), "rewards": 0.0})
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def model(material: Path, tmp_path: Path) -> Path:
    """The tests' model without dropout."""
    directory = tmp_path / "model"
    shutil.copytree(material / "model", directory)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.0}))
    return directory


def note_shares(monkeypatch: pytest.MonkeyPatch, verb: str) -> list[Any]:
    """Note which shares the plans have that a verb of the engine is given."""
    shares: list[Any] = []
    method = getattr(Engine, verb)

    def note(self: Engine, plan: Any, **settings: Any) -> Any:
        shares.append(plan.shares)
        return method(self, plan, **settings)

    monkeypatch.setattr(Engine, verb, note)
    return shares


def test_a_run_is_the_same(
    configure: Callable[..., ResolvedConfig], model: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []
    run = Passes.run

    def note(self: Passes, work: Pass, placed: Any) -> Any:
        modes.append(work.mode)
        return run(self, work, placed)

    monkeypatch.setattr(Passes, "run", note)
    runs, passes = [], []
    for skip in (False, True):
        modes.clear()
        done = run_sft(
            configure(
                str(skip),
                model={"path": str(model), "dtype": "float64"},
                data={"train": str(rollouts), "eval": None},
                training={"steps": 4, "skip_zero_gradients": skip},
                loss={"use": "reinforce"},
                optimizer={"use": "sgd", "learning_rate": 0.1},
            )
        )
        passes.append(modes.copy())
        runs.append(done.directory)
    assert passes == [["forward_backward"] * 4, ["evaluate", "forward_backward"] * 4]
    one, other = (load_file(directory / "model" / "model.safetensors") for directory in runs)
    assert all(np.abs(value - other[name]).max() < 1e-12 for name, value in one.items())
    records = [
        [record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]
        for directory in runs
    ]
    assert len(records[0]) == len(records[1]) == 4
    for before, after in zip(*records, strict=True):
        assert before.keys() == after.keys()
        assert {name: value for name, value in after.items() if name not in OF_PASSES} == pytest.approx(
            {name: value for name, value in before.items() if name not in OF_PASSES}, rel=1e-9
        )


def test_dropout_keeps_every_sample(
    configure: Callable[..., ResolvedConfig], rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masks depend on the rows of a pass."""
    shares = note_shares(monkeypatch, "train")
    run_sft(configure(data={"train": str(rollouts), "eval": None}, training={"steps": 3}, loss={"use": "reinforce"}))
    assert shares == [None] * 3


def test_evaluations_keep_their_rows(
    configure: Callable[..., ResolvedConfig], model: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, evaluated = note_shares(monkeypatch, "train"), note_shares(monkeypatch, "evaluate")
    data = {"train": str(rollouts), "eval": str(rollouts)}
    run_sft(configure(model={"path": str(model)}, data=data, training={"steps": 3}, loss={"use": "reinforce"}))
    assert None not in learned
    assert evaluated == [None] * 3
