"""Traces of a real run: which steps they hold, that they change no number, and what is refused."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import RunConfig
from skyrl_engine.errors import ConfigError, UnsupportedError
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.profiled_steps import ProfiledSteps
from skyrl_engine.training.sft.trainer import run_sft

Configure = Callable[..., ResolvedConfig]
SHORT = {"training": {"steps": 4}, "evaluation": {"at_end": False}, "checkpoint": {"at_end": False, "every": None}}


def losses(directory: Path) -> list[float]:
    return [record["metrics"]["loss"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]


def test_a_trace_of_each_rank_and_the_same_numbers(configure: Configure) -> None:
    plain = run_sft(configure("plain", **SHORT)).directory
    profiled = run_sft(configure("profiled", **SHORT, run={"profile_steps": 2})).directory
    assert losses(profiled) == losses(plain)
    assert [file.name for file in (profiled / "profile").iterdir()] == ["steps-2-3-rank-0.trace.json.gz"]
    with gzip.open(profiled / "profile" / "steps-2-3-rank-0.trace.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    # one optimizer step each, and the backward passes of autograd's threads
    assert len([name for name in names if name.startswith("Optimizer.step")]) == 2
    assert any("Backward" in name for name in names)


@pytest.mark.parametrize(
    ("asked", "done", "total", "steps"),
    [(3, 0, 9, (2, 4)), (3, 4, 9, (6, 8)), (3, 0, 3, (1, 3)), (3, 8, 9, (9, 9)), (None, 0, 9, (2, 1))],
)
def test_steps_of_a_session(asked: int | None, done: int, total: int, steps: tuple[int, int]) -> None:
    chosen = ProfiledSteps.of(RunConfig(profile_steps=asked), None, Path("profile"), done, total)
    assert (chosen.first, chosen.last) == steps


def test_memory_of_cpus_is_refused(configure: Configure) -> None:
    with pytest.raises(UnsupportedError, match="memory is recorded on CUDA devices alone, and this rank computes on cpu"):
        run_sft(configure("run", **SHORT, run={"profile_steps": 1, "profile_memory": True}))
    with pytest.raises(ConfigError, match=r"run\.profile_memory: is not read where no steps are profiled"):
        configure("run", **SHORT, run={"profile_memory": True})


@pytest.mark.nightly
def test_every_rank_records_itself(configure: Configure) -> None:
    directory = run_sft(configure("run", **SHORT, run={"profile_steps": 2, "launch": "ray", "ranks": 2})).directory
    for rank in range(2):
        with gzip.open(directory / "profile" / f"steps-2-3-rank-{rank}.trace.json.gz", "rt") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert len([name for name in names if name.startswith("Optimizer.step")]) == 2
        assert any("reduce" in name for name in names)
