"""One loss curve, however the work is cut: micro-batches of 1 or 8 rows, one rank inline, two ranks by Ray."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from skyrl_engine.training.sft.trainer import run_sft


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves sockets of its own to the garbage collector
def test_inline_and_ray_and_any_micro_batch_give_one_curve(material: Path, tmp_path: Path, configure):
    """Ten AdamW steps with clipping, a schedule and a ragged last mini-batch per epoch.

    Gradients of different cuts agree to about 1e-7; AdamW's division by the root of the second moment magnifies that where a gradient is
    close to 0, so after ten steps at a learning rate of 1e-3 the losses agree to 1e-4 and not to the last bit. Dropout is off: with it,
    another cut draws other masks. What this does not cover: gradients parameter by parameter (test_cut_invariance.py).
    """
    model = tmp_path / "model"
    shutil.copytree(material / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    cuts = {
        "one row": ({"micro_batch_rows": 1}, {}),
        "eight rows": ({"micro_batch_rows": 8}, {}),
        "two ranks, eight rows": ({"micro_batch_rows": 8}, {"launch": "ray", "ranks": 2}),
    }
    curves = {}
    for name, (training, run) in cuts.items():
        result = run_sft(
            configure(
                name.replace(" ", "-"),
                model={"path": str(model)},
                training={"steps": 10, "batch_size": 8, **training},
                run=run,
                optimizer={"learning_rate": 1e-3},
                checkpoint={"every": "none", "at_end": False},
            )
        )
        records = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
        steps = [record["metrics"] for record in records if record["kind"] == "step"]
        curves[name] = np.array([[step["loss"], step["grad_norm"]] for step in steps])
        assert len(steps) == 10
    assert curves["one row"][-1, 0] < curves["one row"][0, 0]
    for name, curve in curves.items():
        np.testing.assert_allclose(curve, curves["one row"], rtol=1e-4, err_msg=name)
