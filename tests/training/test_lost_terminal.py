"""A run whose terminal goes away: it ends after its step with a checkpoint, or goes on where it ignores SIGHUP, as under nohup."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from by_day import now

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.run.metrics import read_metrics

WAIT = 120.0


def run_until_the_terminal_is_gone(resolved: ResolvedConfig, *, ignores: bool) -> int:
    """The exit code of `skyrl-engine run` on a terminal that is closed after some steps."""
    file = Path(resolved.config.run.directory or "").with_suffix(".toml")
    file.write_text(resolved.to_toml())
    metrics = Path(resolved.config.run.directory or "") / "metrics.jsonl"
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover - another process
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)
        os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        os.execv(sys.executable, [sys.executable, "-m", "skyrl_engine", "run", str(file)])
    until = time.monotonic() + WAIT
    while time.monotonic() < until and not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the run did not end")


@pytest.mark.parametrize("ignores", now([False, True], False), ids=["hangs up", "nohup"])
def test_a_run_outlives_its_terminal(configure: Any, ignores: bool) -> None:
    steps = 60 if ignores else 100_000
    resolved = configure(training={"steps": steps}, checkpoint={"every": 50_000}, run={"launch": "inline"})
    code = run_until_the_terminal_is_gone(resolved, ignores=ignores)
    run = Path(resolved.config.run.directory or "")
    log = (run / "run.log").read_text()
    done = [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"][-1]
    assert code == (0 if ignores else 130), log
    assert ("SIGHUP: the run ends after the current step" in log) != ignores
    assert (done == steps) == ignores
    assert (run / "checkpoints" / "latest").read_text() == f"step-{done:08}\n"
    assert [f"step {step} of {steps}: loss " in log for step in range(1, done + 1)] == [True] * done
