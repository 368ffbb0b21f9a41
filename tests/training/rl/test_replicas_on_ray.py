"""Replicas of a generator as actors on several nodes of a real Ray cluster: no bit of a run tells where they were, or what was lost."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.cluster_utils import Cluster
from rl_runs import Rl, kill_run, numbers_of, numbers_without_waits, weights_of

from skyrl_engine.errors import EngineError, UnsupportedError
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.workers import ray_cluster
from skyrl_engine.workers.replicas import ReplicaHost

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray leaves sockets of its own to the garbage collector
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A head without CPUs, which cannot be lost, and two nodes with three each; a test that loses one gives another."""
    with start_head() as cluster:
        for _ in range(2):
            try_again(lambda: cluster.add_node(**make_node(3)))
        yield cluster


@contextmanager
def start_head() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("OMP_NUM_THREADS", "1")
        changed.setenv("RAY_worker_niceness", "0")
        cluster = Cluster()
        try:
            try_again(lambda: cluster.add_node(**make_node(0, include_dashboard=False)))
            yield cluster
        finally:
            cluster.shutdown()


def try_again(start: Callable[[], Any]) -> None:
    """Start a node, again where Ray gives it up: it gives every node 30 seconds, which are few on a busy machine."""
    for left in (2, 1, 0):
        try:
            start()
        except Exception as error:
            if not left or "timed out" not in str(error):
                raise
        else:
            return


def make_node(cpus: int, **more: Any) -> dict[str, Any]:
    return {"num_cpus": cpus, "object_store_memory": 80_000_000, **more}


def raylet_above(pid: int) -> int:
    """Return the id of the process that started an actor's."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def rank_in(log: str) -> int:
    (pid,) = re.findall(r"rank 0: on .*?, pid (\d+)", log)
    return int(pid)


def keys_on(nodes: Any, *more: str) -> tuple[str, ...]:
    return ("run.launch=ray", f"run.ray_address={nodes.address}", "generator.placement=process", "generator.launch=ray", *more)


def is_there(pid: int) -> bool:
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_room_that_is_not_there_is_told(rl: Rl, nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where the cluster is too small, and after a while where others hold it."""
    with pytest.raises(
        UnsupportedError, match=r"generator.replicas = 6 with 1 CPU each needs 6 CPU beside the ranks' 1 CPU, the Ray cluster"
    ):
        run_rl(rl("many", *keys_on(nodes, "generator.replicas=6")))
    with pytest.raises(UnsupportedError, match=r"replicas = 1 with 3.5 CPU each .* has 1 node of 0 CPU, 2 nodes of 3 CPU"):
        run_rl(rl("large", *keys_on(nodes, "generator.cpus=3.5")))
    import ray
    from ray.util.placement_group import placement_group

    monkeypatch.setattr(ray_cluster, "PATIENCE_SECONDS", 3.0)
    ray.init(address=nodes.address, log_to_driver=False)
    try:
        assert placement_group([{"CPU": 3.0}, {"CPU": 1.0}]).wait(30)
        with pytest.raises(
            EngineError, match=r"no room for replica [01] of the generator in \d s: needed are 1 CPU, free are 0 CPU"
        ):
            run_rl(rl("held", *keys_on(nodes, "generator.replicas=2")))
    finally:
        ray.shutdown()


def test_a_killed_controller_leaves_no_actor_behind(rl: Rl, tables_of: Callable[..., dict[str, Any]], nodes: Cluster) -> None:
    keys = keys_on(nodes, "generator.replicas=2", "rl.staleness=2", "checkpoint.every=1")
    kill_run(tables_of("run"), keys, "learned", 1)
    log = (Path(tables_of("run")["run"]["directory"]) / "run.log").read_text()
    pids = [int(pid) for pid in re.findall(r"(?:replica|rank) \d+: on .*?, pid (\d+)", log)]
    assert len(pids) == 3
    until = time.monotonic() + 30
    while (left := [pid for pid in pids if is_there(pid)]) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left
    run = run_rl(rl("run", *keys), resume=True).directory
    assert len(numbers_of(run)) == 2


def test_replicas_that_lose_their_process_and_their_node_change_no_bit(
    rl: Rl, nodes: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of two is on a node of its own; one loses its process, then the other its node, and finds room on that of the first."""
    staleness = ("rl.staleness=1", "rl.in_flight_updates=false", "rl.steps=4")
    wanted = run_rl(rl("whole", *staleness)).directory
    submit = ReplicaHost.submit
    lost: list[str] = []

    def submit_and_kill(self: ReplicaHost, requests: Any) -> None:
        submit(self, requests)
        places = [replica.process._place for replica in self._replicas]  # type: ignore[attr-defined]
        if len(lost) == 2 or None in places:
            return
        keep = raylet_above(rank_in(caplog.text))
        raylets = {raylet_above(place.pid): place for place in places}
        (other,) = raylets.keys() - {keep}
        if not lost:
            assert len(raylets) == 2, "each is on a node of its own"
            lost.append("process")
            os.kill(raylets[keep].pid, signal.SIGKILL)
        else:
            lost.append("node")
            (node,) = [node for node in nodes.list_all_nodes() if node.node_id == raylets[other].machine]
            nodes.remove_node(node, allow_graceful=False)

    monkeypatch.setattr(ReplicaHost, "submit", submit_and_kill)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run = run_rl(rl("lost", *staleness, *keys_on(nodes, "generator.replicas=2"))).directory
    assert lost == ["process", "node"]
    # Ray may give the replacement to the node that is going down, once: it dies once more
    assert caplog.text.count("it is started again, with its") in (2, 3)
    assert weights_of(run) == weights_of(wanted)
    assert numbers_without_waits(run) == numbers_without_waits(wanted)
    try_again(lambda: nodes.add_node(**make_node(3)))


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a file system for one node alone")
def test_a_node_that_does_not_see_the_folder_of_the_weights_is_refused(rl: Rl, tmp_path: Path) -> None:
    """The rank is where a CPU is, the replica where a GPU is said to be."""
    hidden = tmp_path / "apart"
    hidden.mkdir()
    with start_head() as cluster:
        try_again(lambda: cluster.add_node(**make_node(1)))
        command = f"{sys.executable} -m ray.scripts.scripts start --address={cluster.address} --num-cpus=0 --num-gpus=1"
        words = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs none {hidden} && exec {command} --disable-usage-stats"]
        before = set(processes_of(cluster))
        subprocess.run(words, check=True, timeout=120, capture_output=True)
        try:
            keys = keys_on(cluster, f"run.directory={hidden / 'run'}", "generator.cpus=0", "generator.gpus=1")
            with pytest.raises(UnsupportedError, match=r"replica 0 of the generator does not see .*apart/run/generator"):
                run_rl(rl("run", *keys))
        finally:
            for pid in set(processes_of(cluster)) - before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_of(cluster: Cluster) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if cluster.address.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                yield int(folder.name)
