"""Killed while the next mini-batch is made and two ranks of Ray work, and resumed, a run ends with the bytes of one that was not killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from by_day import now
from pair_runs import runs_over, write_pairs

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.run.manifest import read_manifest
from skyrl_engine.run.metrics import read_metrics

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800)]

Configure = Callable[..., ResolvedConfig]

RUNNER: Final = """
import os
import signal
import sys

from skyrl_engine.cli.app import main
from skyrl_engine.data.dataset import TokenizedDataset
from skyrl_engine.engine.engine import Engine
from skyrl_engine.training.sft.trainer import SftTrainer
from skyrl_engine.workers.ray_transport import RayTransport

file, moment, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
trainers = []


def kill_after(this, owner, name):
    original = getattr(owner, name)

    def call(self, *arguments, **options):
        result = original(self, *arguments, **options)
        if moment == this and trainers and trainers[-1].engine.step == step - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)


plan_ahead = SftTrainer._plan_ahead


def begin(self):
    # the engine counts a step once its optimizer has stepped
    trainers.append(self)
    try:
        return plan_ahead(self)
    finally:
        trainers.pop()


SftTrainer._plan_ahead = begin
kill_after("read", TokenizedDataset, "batch")
kill_after("cut", Engine, "plan")
kill_after("half placed", RayTransport, "put")
kill_after("placed", Engine, "place")
raise SystemExit(main(["run", file, "checkpoint.resume=true", "--quiet"]))
"""
"""Runs the configuration file `argv[1]`, and kills its own process at the moment `argv[2]` of the mini-batch that is made during a step."""


def run(folder: Path, resolved: ResolvedConfig, moment: str = "never", step: int = 0) -> int:
    """Run or resume in a process of its own; return its exit code, which is that of a signal where it was killed."""
    file = folder / "run.toml"
    file.write_text(resolved.to_toml())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUNNER, str(file), moment, str(step)]
    # processes of Ray, which end a little later, would hold a pipe open
    with (folder / "said").open("w") as said:
        ended = subprocess.run(command, env=environment, stdout=said, stderr=said, timeout=400, check=False)
    assert ended.returncode in (0, -signal.SIGKILL), (folder / "said").read_text()
    return ended.returncode


def steps(directory: Path) -> list[dict[str, Any]]:
    records = [record for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]
    return [{name: value for name, value in record["metrics"].items() if name != "tokens_per_second"} for record in records]


def assert_same_bytes_despite_kills(folder: Path, configure: Configure, moments: Sequence[str], **settings: dict[str, Any]) -> None:
    """Kill a run at one moment after another, each in the step after a checkpoint; compare it with one that nobody killed."""
    length = {"steps": 2 * len(moments) + 2, "batch_size": 8, "micro_batch_rows": "none"}
    settings = {"run": {"launch": "ray", "ranks": 2}, "training": length, "checkpoint": {"every": 2}, **settings}
    whole, killed = configure("whole", **settings), configure("killed", **settings)
    assert run(folder, whole) == 0
    for number, moment in enumerate(moments, 1):
        assert run(folder, killed, moment, 2 * number + 1) == -signal.SIGKILL, moment
    assert run(folder, killed) == 0
    starts = [session["start_step"] for session in read_manifest(folder / "killed" / "run.json")["sessions"]]
    assert starts == [0, *range(2, 2 * len(moments) + 1, 2)]
    assert steps(folder / "killed") == steps(folder / "whole")
    weights = (folder / "killed" / "model" / "model.safetensors").read_bytes()
    assert weights == (folder / "whole" / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("moments", now(["half placed", "read, cut, placed"], "half placed"))
def test_fine_tuning(configure: Configure, tmp_path: Path, moments: str) -> None:
    """Kills fall between the shards of the two ranks; by night after reading, after cutting, and when both shards are placed."""
    assert_same_bytes_despite_kills(tmp_path, configure, moments.split(", "))


@pytest.mark.nightly
def test_preferences(tmp_path: Path) -> None:
    """The reference's scores are data here, so that the next mini-batch is placed too."""
    configure = runs_over(write_pairs(tmp_path / "material"), "preference", tmp_path)
    assert_same_bytes_despite_kills(tmp_path, configure, ("read", "placed"), reference={"precompute": True})
