"""One configuration, other layouts of ranks: one loss curve, through the engine; and a run that changes its layout on the way."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.export import export_checkpoint
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]

pytestmark = [
    pytest.mark.proof,
    pytest.mark.usefixtures("without_ray"),
]

TWO = {"launch": "ray", "ranks": 2}
TP = {"tensor_parallel": 2}


@pytest.fixture(scope="module")
def model(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without dropout, of which another layout would draw other masks; two ranks can share its heads, and its vocabulary too."""
    directory = tmp_path_factory.mktemp("layouts") / "model"
    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    tokenizer.save_pretrained(directory)
    assert len(tokenizer) <= 32
    write_model(directory, tokenizer=tokenizer, vocab_size=32, hidden_size=32, intermediate_size=64, head_dim=8)
    return directory


def train(configure: Configure, model: Path, name: str, *, resume: bool = False, steps: int = 8, **tables: object) -> Path:
    """The directory of a run. AdamW's epsilon is large, so that a gradient near zero moves a weight as little as rounding moves it."""
    optimizer = {"learning_rate": 1e-2, "epsilon": 0.1, "schedule": "constant", "warmup_steps": 0}
    resolved = configure(
        name, model={"path": str(model)}, training={"steps": steps, "micro_batch_rows": 2}, optimizer=optimizer, **tables
    )
    return run_sft(resolved, resume=resume).directory


def curve(directory: Path) -> np.ndarray:
    """Loss and gradient norm of every step."""
    steps = [record["metrics"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]
    return np.array([[step["loss"], step["grad_norm"]] for step in steps])


@pytest.mark.nightly
def test_tensor_parallel_ranks_give_the_curve_of_one(configure: Configure, model: Path, tmp_path: Path) -> None:
    """And their checkpoint becomes the same model on one rank as they wrote at the end."""
    alone = curve(train(configure, model, "alone"))
    run = train(configure, model, "together", run=TWO, backend=TP)
    assert len(alone) == 8
    assert alone[-1, 0] < alone[0, 0]
    np.testing.assert_allclose(curve(run), alone, rtol=1e-4)
    export_checkpoint(run, tmp_path / "exported")
    exported, written = (load_file(place / "model.safetensors") for place in (tmp_path / "exported", run / "model"))
    assert exported.keys() == written.keys()
    assert all(torch.equal(exported[name], written[name]) for name in written)


def test_a_run_changes_its_layout_and_goes_on(configure: Configure, model: Path) -> None:
    alone = curve(train(configure, model, "alone"))
    train(configure, model, "moved", steps=3, run=TWO)
    run = train(configure, model, "moved", steps=6, run=TWO, backend=TP, resume=True)
    train(configure, model, "moved", resume=True)
    np.testing.assert_allclose(curve(run), alone, rtol=1e-4)
