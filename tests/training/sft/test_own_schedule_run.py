"""A run whose learning rate follows a function in a file: over a break too, and refused while it is planned where the function fails."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_engine.config import ResolvedConfig, load, resolve
from skyrl_engine.errors import ContractError, UntrustedCodeError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import plan_sft, run_sft


def test_a_run_follows_a_function_over_a_break(configure: Callable[..., ResolvedConfig], tmp_path: Path) -> None:
    file = tmp_path / "course.py"
    file.write_text(
        "def falls(step, steps):\n    return 1 - step / steps\n\n\ndef below(step, steps):\n    return 0.5 - step / steps\n"
    )
    own = {"schedule": f"{file}:falls", "warmup_steps": 1, "learning_rate": 0.5}
    run_sft(configure("run", optimizer=own, training={"steps": 5}, checkpoint={"every": 2, "at_end": False}))
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-00000002\n")
    run = run_sft(configure("run", optimizer=own, training={"steps": 5}), resume=True).directory
    steps = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"]
    assert [record["metrics"]["learning_rate"] for record in steps] == [0.5, 0.5, 0.375, 0.25, 0.125]
    with pytest.raises(ContractError, match=r"below, at step 3 of 4, returned -0\.25"):
        plan_sft(configure("planned", optimizer={**own, "schedule": f"{file}:below"}, training={"steps": 5}))
    resolve(load(run / "config.toml"))
    file.write_text(file.read_text().replace("1 -", "2 -"))
    with pytest.raises(UntrustedCodeError, match=r"optimizer\.schedule = .*course\.py:falls .*was changed since you made the run"):
        resolve(load(run / "config.toml"))
