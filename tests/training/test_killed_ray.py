"""Ray's own processes, killed in the middle of a run: it ends soon with the code of a dead rank, and its line says what happened."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import WorkerError
from skyrl_engine.run.metrics import read_metrics

pytestmark = [pytest.mark.proof]

SOON = 40.0
"""Seconds from the death of Ray to the end of the run: Ray itself notices a dead GCS after 60, and ends the process without a word."""


def processes_under(pid: int) -> Iterator[tuple[int, str]]:
    """The ids and commands of a process's descendants."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents.setdefault(int((folder / "stat").read_text().rpartition(")")[2].split()[1]), []).append(int(folder.name))
        except OSError:
            continue
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            waiting.append(child)
            try:
                yield child, Path(f"/proc/{child}/cmdline").read_text().partition("\0")[0]
            except OSError:
                continue


def is_alive(pid: int, command: str) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().startswith(command)
    except OSError:
        return False


@pytest.mark.parametrize(
    ("killed", "named"), [("raylet", "Ray's raylet on this machine"), ("gcs_server", "Ray's GCS, the head of the cluster,")]
)
def test_a_run_ends_as_after_a_dead_rank(configure: Callable[..., ResolvedConfig], killed: str, named: str) -> None:
    resolved = configure(
        run={"launch": "ray", "ranks": 2},
        training={"batch_size": 8, "micro_batch_rows": 1, "steps": 100_000},
        checkpoint={"every": 100_000},
    )
    run = Path(resolved.config.run.directory or "")
    file, err = run.with_suffix(".toml"), run.with_suffix(".err")
    file.write_text(resolved.to_toml())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "skyrl_engine", "run", str(file)]
    with err.open("w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    try:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until and len(steps_of(run)) < 3:
            time.sleep(0.1)
        under = list(processes_under(process.pid))
        (victim,) = [pid for pid, command in under if command.endswith(f"/{killed}")]
        at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        code = process.wait(90)
        assert time.monotonic() - at < SOON
    finally:
        process.kill()
        process.wait()
    ranks = [(pid, command) for pid, command in under if command.startswith("ray::RankActor")]
    assert len(ranks) == 2
    text, log = err.read_text(), (run / "run.log").read_text()
    assert code == WorkerError.exit_code, text
    assert f"error: {named}" in text
    assert "ended during" in text
    assert "ranks 0 and 1 with it" in text
    assert "resume from the latest checkpoint" in text
    assert "the session failed: Ray's" in log
    until = time.monotonic() + 10
    while any(is_alive(*rank) for rank in ranks) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(is_alive(*rank) for rank in ranks), "no rank is left behind"


def steps_of(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return [record["step"] for record in read_metrics(file) if record["kind"] == "step"] if file.exists() else []
