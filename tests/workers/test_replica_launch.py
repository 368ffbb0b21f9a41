"""Replicas on this machine: the cores that each computes with."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.workers.replica_launch import LocalLauncher


@pytest.mark.parametrize(
    ("cores", "replicas", "ranks", "threads"), [(8, 1, 1, 4), (8, 3, 1, 2), (2, 1, 1, 1), (2, 4, 2, 1), (6, 1, 0, 6)]
)
def test_a_replica_computes_with_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, replicas: int, ranks: int, threads: int
) -> None:
    started: list[dict[str, str]] = []

    class Started:
        def __init__(self, *_: Any, env: dict[str, str], **__: Any) -> None:
            started.append(env)

        def wait(self, **_: Any) -> int:
            return 0

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launcher = LocalLauncher(("cpu",) * replicas, ranks)
    launcher.launch(0, tmp_path / "log").end(0.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launcher.launch(0, tmp_path / "log").end(0.0)
    assert [env["OMP_NUM_THREADS"] for env in started] == [str(threads), "3"]
