"""Ray's own processes, killed in the middle of a run: it ends soon with the code of a dead rank, and its line says what happened.

So it does on a cluster that the run started, and on one that it joined by `run.ray_address`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from attrs import frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import WorkerError
from skyrl_engine.run.metrics import read_metrics

pytestmark = [pytest.mark.proof]

SOON = 40.0
"""Seconds from the death of Ray to the end of the run: Ray itself notices a dead GCS after 60, and ends the process without a word."""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes_under(pid: int) -> Iterator[tuple[int, str]]:
    """The ids and commands of a process's descendants."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents.setdefault(parent_of(int(folder.name)), []).append(int(folder.name))
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


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def environment(**variables: str | None) -> dict[str, str]:
    """Return the variables of a test's processes: one token for its cluster and its runs, whatever this machine's user has. None leaves out."""
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 16}
    return {name: value for name, value in {**os.environ, **own, **variables}.items() if value is not None}


@frozen
class Cluster:
    """A cluster that somebody else started: the processes of its head node, by the last part of their command."""

    address: str
    folder: Path

    def processes(self) -> dict[int, str]:
        """Return the ids of what runs for this cluster, which has a folder of its own, with their commands."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (folder / "cmdline").read_text().split("\0")
                if any(str(self.folder) in word for word in words) and int(folder.name) != os.getpid():
                    found[int(folder.name)] = words[0]
        return found


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head started by `ray start`, with ports and a folder of its own; all of it is ended by its ids."""
    with contextlib.ExitStack() as bound:
        servers = [bound.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [server.getsockname()[1] for server in servers]
    # Ray's sockets are in it, and their paths may have 107 bytes
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        cluster = Cluster(f"127.0.0.1:{ports[0]}", Path(folder))
        options = dict(zip(("port", "dashboard-agent-listen-port", "metrics-export-port"), ports, strict=True))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1", "--num-cpus=2"]
        command += [f"--{name}={port}" for name, port in options.items()]
        command += [f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats"]
        try:
            subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=120)
            yield cluster
        finally:
            until = time.monotonic() + 30
            while (left := cluster.processes()) and time.monotonic() < until:
                kill(left)
                time.sleep(0.2)


Started = tuple["subprocess.Popen[bytes]", Path, Path]


@contextlib.contextmanager
def start_run(resolved: ResolvedConfig, **variables: str | None) -> Iterator[Started]:
    """Run the configuration in a process of its own until it has done a few steps; what it prints goes to a file."""
    run = Path(resolved.config.run.directory or "")
    file, err = run.with_suffix(".toml"), run.with_suffix(".err")
    file.write_text(resolved.to_toml())
    command = [sys.executable, "-m", "skyrl_engine", "run", str(file)]
    with err.open("w") as log:
        process = subprocess.Popen(command, env=environment(**variables), stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until and len(steps_of(run)) < 3:
            time.sleep(0.1)
        yield process, run, err
    finally:
        process.kill()
        process.wait()


LONG = {"training": {"batch_size": 8, "micro_batch_rows": 1, "steps": 100_000}, "checkpoint": {"every": 100_000}}
RAYLET, GCS = "Ray's raylet on this machine", "Ray's GCS, the head of the cluster,"


def end_of_run(victim: int, process: "subprocess.Popen[bytes]", *, within: float) -> int:
    """Kill a process of Ray; return the exit code of the run, which ends so soon."""
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    code = process.wait(within + 50)
    assert time.monotonic() - at < within
    return code


def check_told(code: int, err: Path, run: Path, named: str) -> str:
    """Return what was printed: a refusal with the code of a dead rank, which the log has too."""
    text, log = err.read_text(), (run / "run.log").read_text()
    assert code == WorkerError.exit_code, text
    assert f"error: {named}" in text
    assert "ended during" in text
    assert "ranks 0 and 1 with it" in text
    assert "resume from the latest checkpoint" in text
    assert f"the session failed: {named}" in log
    return text


def check_gone(processes: Mapping[int, str]) -> None:
    """Hold that none of these processes is left behind; Ray's agents notice the end of their raylet on their own, within a minute."""
    processes_of_ray = {pid: command for pid, command in processes.items() if not command.endswith("Agent")}
    until = time.monotonic() + 20
    while (
        left := {pid: command for pid, command in processes_of_ray.items() if is_alive(pid, command)}
    ) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def ranks_of(processes: Mapping[int, str]) -> dict[int, str]:
    return {pid: command for pid, command in processes.items() if command.startswith("ray::RankActor")}


@pytest.mark.parametrize(("killed", "named"), [("raylet", RAYLET), ("gcs_server", GCS)])
def test_a_run_ends_as_after_a_dead_rank(configure: Callable[..., ResolvedConfig], killed: str, named: str) -> None:
    resolved = configure(run={"launch": "ray", "ranks": 2}, **LONG)
    with start_run(resolved) as (process, run, err):
        under = dict(processes_under(process.pid))
        (victim,) = [pid for pid, command in under.items() if command.endswith(f"/{killed}")]
        code = end_of_run(victim, process, within=SOON)
    check_told(code, err, run, named)
    assert len(ranks_of(under)) == 2
    check_gone(under)


@pytest.mark.parametrize(
    ("killed", "named", "within"),
    # Ray ends this process 60 seconds after the last sign of a GCS, without a word; the other limit is that of test_a_run_ends
    [("raylet", RAYLET, SOON), pytest.param("gcs_server", GCS, 58.0, marks=pytest.mark.nightly)],
)
def test_so_it_does_where_a_cluster_that_it_joined_ends(
    configure: Callable[..., ResolvedConfig], cluster: Cluster, killed: str, named: str, within: float
) -> None:
    resolved = configure(run={"launch": "ray", "ranks": 2, "ray_address": cluster.address}, **LONG)
    with start_run(resolved) as (process, run, err):
        processes = dict(processes_of_ranks(cluster))
        (victim,) = [pid for pid, command in cluster.processes().items() if command.endswith(f"/{killed}")]
        code = end_of_run(victim, process, within=within)
    assert "start Ray again" in check_told(code, err, run, named)
    assert len(ranks_of(processes)) == 2
    if killed == "raylet":  # the ranks of a lost GCS end with their raylet, when that gives the GCS up
        check_gone(ranks_of(processes))


def processes_of_ranks(cluster: Cluster) -> Iterator[tuple[int, str]]:
    for pid in cluster.processes():
        yield from processes_under(pid)


def test_a_joined_cluster_goes_on_after_a_run_and_takes_the_next(
    configure: Callable[..., ResolvedConfig], cluster: Cluster
) -> None:
    """All that the run held there is free again: two ranks need both CPUs."""
    heads = {pid: command for pid, command in cluster.processes().items() if command.endswith(("/raylet", "/gcs_server"))}
    assert len(heads) == 2
    for name in ("first", "second"):
        folder = {"directory": str(cluster.folder / name), "launch": "ray", "ranks": 2, "ray_address": cluster.address}
        resolved = configure(run=folder, training={"steps": 3})
        with start_run(resolved) as (process, run, err):
            assert process.wait(120) == 0, err.read_text()
        assert steps_of(run) == [1, 2, 3]
        assert all(is_alive(*head) for head in heads.items())


def test_a_cluster_that_is_not_there_is_refused_by_its_address(configure: Callable[..., ResolvedConfig], cluster: Cluster) -> None:
    """It is not begun on this machine instead."""
    kill(cluster.processes())
    resolved = configure(run={"launch": "ray", "ranks": 2, "ray_address": cluster.address})
    with start_run(resolved) as (process, _, err):
        code = process.wait(120)
    assert (code, f"no Ray cluster can be joined at {cluster.address}" in err.read_text()) == (4, True)


def test_a_cluster_that_asks_for_a_token_is_told(configure: Callable[..., ResolvedConfig], cluster: Cluster) -> None:
    """Ray sends none to an address that is named, unless RAY_AUTH_MODE says so."""
    resolved = configure(run={"launch": "ray", "ranks": 2, "ray_address": cluster.address})
    with start_run(resolved, RAY_AUTH_MODE=None) as (process, _, err):
        code = process.wait(120)
    assert (code, "set RAY_AUTH_MODE=token" in err.read_text()) == (4, True)


IN_A_CALL = """
import os
import signal
import subprocess

import numpy
import ray
from skyrl_engine import hookimpl


class Killer:
    @hookimpl
    def skyrl_engine_step_finished(self, event):
        if event.step == 100:
            pid = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
            os.kill(pid, signal.SIGSTOP)  # it takes no call any more, so that its end comes in the middle of one
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -KILL {pid}"])
            ray.put(numpy.zeros(1_000_000))


class KillerPlugin:
    @hookimpl
    def skyrl_engine_make_observer(self, config):
        return Killer()


killer = KillerPlugin()
"""


def test_so_it_does_where_ray_ends_in_the_middle_of_a_call(configure: Callable[..., ResolvedConfig], tmp_path: Path) -> None:
    """Ray then ends the process that called, with code 1 and without an exception: the one above it says what happened."""
    (tmp_path / "killer.py").write_text(IN_A_CALL)
    observers = ["metrics_jsonl", f"{tmp_path / 'killer.py'}:killer"]
    resolved = configure(run={"launch": "ray", "ranks": 2, "observers": observers}, **LONG)
    with start_run(resolved) as (process, run, err):
        under = dict(processes_under(process.pid))
        code = process.wait(60)
    text = check_told(code, err, run, RAYLET)
    assert len(ranks_of(under)) == 2
    check_gone(under)
    assert "with which Ray ended the run" in text
    assert f"the log: {run / 'run.log'}" in text
    (session,) = json.loads((run / "run.json").read_text())["sessions"]
    assert session["end_step"] == steps_of(run)[-1]
    assert session["error"].startswith(RAYLET)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.nightly) for number in (signal.SIGINT, signal.SIGKILL))],
)
def test_a_signal_to_the_command_reaches_its_run_once(configure: Callable[..., ResolvedConfig], number: signal.Signals) -> None:
    """A run with Ray is a process under the command's own: the first signal lets it end after its step, and it dies with the command."""
    resolved = configure(run={"launch": "ray", "ranks": 2}, **LONG)
    with start_run(resolved) as (process, run, err):
        under = dict(processes_under(process.pid))
        (below,) = [pid for pid, command in under.items() if command == sys.executable and parent_of(pid) == process.pid]
        os.kill(process.pid, number)
        code = process.wait(60)
        until = time.monotonic() + 20
        while is_alive(below, sys.executable) and time.monotonic() < until:
            time.sleep(0.1)
        assert not is_alive(below, sys.executable)
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert (code, f"stopped by {number.name} after step" in err.read_text()) == (130, True)
        assert list((run / "checkpoints").glob("step-*"))
    check_gone(under)


def steps_of(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return [record["step"] for record in read_metrics(file) if record["kind"] == "step"] if file.exists() else []
