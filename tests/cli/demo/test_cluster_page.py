"""Every command of the page on clusters runs as it is written, on two Ray nodes of this machine; one node is ended in the middle of a run."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray")
pytest.importorskip("reasoning_gym")

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "tutorials" / "from-laptop-to-cluster.md").read_text()
HEAD, PORT = "10.0.0.1", "6379"
"""The address that the page takes for the reader's own."""

pytestmark = [pytest.mark.example, pytest.mark.nightly, pytest.mark.timeout(900)]


def blocks_of(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", PAGE)


class Machines:
    """The reader's machines: commands run in one shared folder, and nodes of Ray stay until they are ended."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.folder = folder / "first"
        self.nodes: list[subprocess.Popen[bytes]] = []
        home = folder / "home"
        home.mkdir()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "HOME": str(home), "PATH": path, "RAY_AUTH_MODE": "token"}
        self._more = f" --block --num-cpus=1 --object-store-memory=80000000 --disable-usage-stats --temp-dir={folder / 'ray'}"

    def read(self, line: str) -> str:
        return line.replace(HEAD, "127.0.0.1").replace(PORT, self.port)

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-ec", self.read(line)], cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )

    def begin(self, line: str) -> subprocess.Popen[str]:
        command = ["bash", "-ec", f"exec {self.read(line)}"]
        return subprocess.Popen(command, cwd=self.folder, env=self._environment, stderr=subprocess.PIPE, text=True)

    def start_node(self, line: str) -> None:
        more = self._more if "--head" in line else self._more.partition(" --temp-dir")[0]
        command = ["bash", "-ec", f"exec {self.read(line)}{more} >> ray.log 2>&1"]
        self.nodes.append(subprocess.Popen(command, cwd=self.folder, env=self._environment, start_new_session=True))

    def wait_for_nodes(self, count: int) -> None:
        (ask,) = (line for line in lines_of("ray status") if line.startswith("ray status"))
        until = time.monotonic() + 120
        while (said := self.run(ask).stdout).count(" node_") < count:
            assert time.monotonic() < until, f"{said}\n{(self.folder / 'ray.log').read_text()}"
            time.sleep(1)

    def lose(self, node: subprocess.Popen[bytes]) -> None:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
        self.nodes.remove(node)

    def close(self) -> None:
        for node in reversed(self.nodes):
            os.killpg(node.pid, signal.SIGTERM)
        for node in reversed(self.nodes):
            node.wait()


def lines_of(word: str) -> list[str]:
    """Return the command lines of the shell blocks in which a word stands."""
    return [line for block in blocks_of("sh") if word in block for line in block.splitlines()]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    demo = [sys.executable, "-m", "skyrl_engine", "demo", "--output", "first", "--only", "sft", "--steps", "2", "--quiet"]
    subprocess.run(demo, cwd=folder, check=True)
    machines = Machines(folder)
    (configuration,) = blocks_of("toml")
    (machines.folder / "train.toml").write_text(configuration)
    try:
        yield machines
    finally:
        machines.close()


def test_every_command_runs_and_every_run_has_the_same_weights(machines: Machines) -> None:
    done, starts = [], [line for line in lines_of("ray start") if line.startswith("ray start")]
    assert len(starts) == 2
    for block in blocks_of("sh"):
        for line in block.splitlines():
            if line in starts:
                machines.start_node(line)
            elif line.startswith("ray status"):
                machines.wait_for_nodes(2)
            elif "checkpoint.resume=true" in line:
                machines.lose(machines.nodes[-1])
                lose_a_node_during(machines, line.replace("/cluster", "/lost").replace("checkpoint.resume=true", ""), starts[1])
                done.append(line.replace("/cluster", "/lost"))
                finish(machines, done[-1])
            elif not line.startswith(("python -m pip", "export")):  # conftest.py checks that the distributions exist
                done.append(line)
                finish(machines, line)
    assert [line.split()[1] for line in done if line.startswith("skyrl-engine")] == [
        *("plan", "run", "run", "runs", "doctor", "lock", "run", "runs", "run"),
    ]
    weights = {name: (machines.folder / "runs" / name / "model" / "model.safetensors").read_bytes() for name in ("cluster", "lost")}
    assert weights["lost"] == weights["cluster"]
    for name in ("ranks", "cluster"):
        said = machines.run(f"skyrl-engine runs diff ./runs/laptop ./runs/{name}").stdout
        assert "run.ranks" in said
        assert "loss" not in said, said


def finish(machines: Machines, line: str) -> None:
    said = machines.run(line)
    assert said.returncode == 0, f"{line}\n{said.stdout}\n{said.stderr}"


def lose_a_node_during(machines: Machines, line: str, start: str) -> None:
    """Run a command, end the node of a rank after the first checkpoint, see the error, and let another node join."""
    machines.start_node(start)
    machines.wait_for_nodes(2)
    run = machines.begin(line)
    until = time.monotonic() + 120
    while not list((machines.folder / "runs" / "lost" / "checkpoints").glob("*")):
        assert time.monotonic() < until
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.02)
    machines.lose(machines.nodes[-1])
    _, said = run.communicate(timeout=200)
    assert run.returncode != 0
    assert re.search(r"the node .* was lost during run, and rank [01] with it", said), said
    machines.start_node(start)
    machines.wait_for_nodes(2)


def test_rays_launcher_takes_the_cluster_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    table = yaml.safe_load((DOCS / "examples" / "ray-cluster.yaml").read_text())
    validate_config(prepare_config(table))
    starts = [line.partition("--autoscaling-config")[0] for key in table if key.endswith("ray_commands") for line in table[key][1:]]
    for start in lines_of("ray start"):
        if start.startswith("ray start"):
            assert any(start.replace(HEAD, "$RAY_HEAD_IP") in line for line in starts), start
