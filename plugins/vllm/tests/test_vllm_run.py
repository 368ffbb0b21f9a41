"""A run by reinforcement whose generator is `vllm`, over a small server of ours that it starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_runs import reinforce

from skyrl_engine import UnsupportedError, read_rollouts
from skyrl_engine.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("routes_forked")

ROUTES = Path(__file__).parents[3] / "tests" / "running" / "forked_servers.py"
"""It stands for a server of vllm_routes.py."""


def run_over_vllm(tmp_path: Path, name: str = "run", generator: dict[str, Any] | None = None, **rl: Any) -> Path:
    return reinforce(tmp_path, {"use": "vllm", "command": [sys.executable, str(ROUTES)], **(generator or {})}, name, **rl)


def test_each_step_samples_from_the_weights_of_the_step_before(tmp_path: Path) -> None:
    """The guard of the run compares the server's log-probabilities with the model's after every step, and would end it."""
    directory = run_over_vllm(tmp_path)
    groups = list(read_rollouts(directory))
    versions = [set(attempt.versions.versions.tolist()) for group in groups for attempt in group.trajectories]
    assert sorted(set().union(*versions)) == [0, 1, 2]
    assert all(len(each) == 1 for each in versions)
    assert (directory / "generator" / "vllm-0.log").exists()


def test_a_server_sleeps_while_the_ranks_train(tmp_path: Path) -> None:
    """It refuses to sample, or to take weights, where it was not woken for them; the guard compares log-probabilities as before."""
    sharing = {"share_devices": True, "enable_sleep_mode": True}
    directory = run_over_vllm(tmp_path, generator=sharing, steps=2)
    versions = {
        version for group in read_rollouts(directory) for a in group.trajectories for version in a.versions.versions.tolist()
    }
    assert versions == {0, 1}
    words = [line.read_bytes() for line in Path("/proc").glob("[0-9]*/cmdline") if line.exists()]
    assert not [line for line in words if str(directory.parent).encode() in line], "the server outlived its run"


def test_servers_without_sleep_mode_do_not_share_devices(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="does not declare the capability 'sleep'"):
        run_over_vllm(tmp_path, generator={"share_devices": True})


def test_servers_sample_beside_training_within_the_bound(tmp_path: Path) -> None:
    """After every update the run asks for a fixed prompt's log-probabilities, which the ranks scored, and would end it too."""
    directory = run_over_vllm(tmp_path, staleness=1, steps=4)
    steps = [record for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]
    assert [record["metrics"]["async/staleness_max"] for record in steps] == [0.0, 1.0, 1.0, 1.0]
    tokens = [
        record["metrics"]["async/tokens_of_staleness/0"] + record["metrics"].get("async/tokens_of_staleness/1", 0.0)
        for record in steps
    ]
    assert tokens == [1.0] * 4


GENERATE = "/inference/v1/generate"
FAULTS = {
    "killed before an update": ("/pause", 3, "exit"),
    "killed as an update opens": ("/start_weight_update", 3, "killed behind it"),
    "killed in an update": ("/update_weights", 3, "exit"),
    "killed after tensors came": ("/finish_weight_update", 3, "killed behind it"),
    "killed after an update": ("/resume", 3, "killed behind it"),
    "killed amid requests": (GENERATE, 20, "killed behind it"),
    "slow": (GENERATE, 15, "slow"),
    "hangs": (GENERATE, 15, "hang"),
    "answers twice": (GENERATE, 15, "twice"),
    "answers another request": (GENERATE, 15, "the last one's"),
    "connection cut in the middle": (GENERATE, 15, "cut"),
    "connection of an update cut": ("/finish_weight_update", 3, "cut"),
}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_faults_of_servers_beside_training_change_no_bit(tmp_path: Path, subtests: "pytest.Subtests") -> None:
    """Two servers, of which one meets a fault in the third update, or as it samples beside a step: the run goes on to the same bits."""
    drained = {"staleness": 2, "steps": 5, "in_flight_updates": False}
    wanted = run_over_vllm(tmp_path, "whole", {"servers": 2}, **drained)
    for number, (fault, (path, count, what)) in enumerate(FAULTS.items()):
        with subtests.test(fault):
            file = tmp_path / f"fault-{number}"
            told = json.dumps([{"path": path, "count": count, "what": what, "file": str(file)}])
            servers = {"servers": 2, "environment": {"VLLM_ROUTES_FAULTS": told}, "request_seconds": 10.0, "update_seconds": 20.0}
            run = run_over_vllm(tmp_path, f"run-{number}", servers, **drained)
            assert file.exists(), "the fault came"
            assert (run / "model" / "model.safetensors").read_bytes() == (wanted / "model" / "model.safetensors").read_bytes()
            assert attempts_of(run) == attempts_of(wanted)


def attempts_of(run: Path) -> dict[int, list[tuple[list[int], list[int]]]]:
    """Return tokens and versions of all attempts, by ticket: groups are recorded in the order in which they end."""
    return {
        group.ticket: [(attempt.token_ids.tolist(), attempt.versions.versions.tolist()) for attempt in group.trajectories]
        for group in read_rollouts(run)
    }
