"""A rank that is killed in the middle of a step, for every installed backend: the run ends soon, names it and why, and a resume is exact."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_ranks import Kill

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import WorkerError
from skyrl_engine.registry.discovery import discover
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import run_sft
from skyrl_engine.workers.ray_cluster import connect, import_ray

pytestmark = [
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves sockets of its own to the garbage collector
]

BACKENDS = [
    pytest.param(record.reference, marks=() if record.name == "fsdp" else pytest.mark.nightly)
    for record in discover().records
    if record.kind == "backend"
]
"""A rank's death is Ray's and the engine's matter; that a backend resumes to the bit is also promised by its suite."""

SOON = 30.0
"""Seconds from the death of a rank to the end of the run."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """One Ray for all runs: starting it takes seconds."""
    ray = import_ray()
    connect(ray, None, 2)
    yield
    ray.shutdown()


def steps(directory: Path) -> dict[int, tuple[float, float, float]]:
    """Loss, gradient norm and learning rate by step."""
    records = [record for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]
    names = ("loss", "grad_norm", "learning_rate")
    return {record["step"]: tuple(record["metrics"][name] for name in names) for record in records}


@pytest.fixture(scope="module")
def model(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without dropout, which not every backend trains with."""
    directory = tmp_path_factory.mktemp("killed") / "model"
    shutil.copytree(material / "model", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    return directory


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_ends_the_run_and_a_resume_repeats_it(
    configure: Callable[..., ResolvedConfig], model: Path, backend: str
) -> None:
    """The steps between the checkpoint and the kill are done twice, and are the same to the last bit.

    What this does not cover: random states (the backends' own promise), a machine that vanishes (Ray declares its actors dead in its time).
    """
    tables: dict[str, Any] = {
        "model": {"path": str(model)},
        "backend": {"use": backend},
        "run": {"launch": "ray", "ranks": 2},
        "training": {"batch_size": 8, "micro_batch_rows": 1, "steps": 7},
    }
    resolved = configure(**tables)
    run = Path(resolved.config.run.directory or "")
    kill = Kill(after=5)
    with pytest.raises(WorkerError, match=r"rank [01] died during (run|optim_step): .*[a-z]") as caught:
        run_sft(resolved, observers=[kill])
    assert kill.at is not None
    assert time.monotonic() - kill.at < SOON
    assert caught.value.rank in (0, 1)
    assert "resume from the latest checkpoint" in caught.value.remedy
    before = steps(run)
    assert list(before) == [1, 2, 3, 4, 5]
    assert (run / "checkpoints" / "latest").read_text() == "step-00000003\n"
    assert run_sft(resolved, resume=True).step == 7
    after = steps(run)
    assert list(after) == [1, 2, 3, 4, 5, 6, 7]
    assert {step: after[step] for step in before} == before
