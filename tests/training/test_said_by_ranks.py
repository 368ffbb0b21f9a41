"""Ranks under Ray print, log and warn into run.log, with their place; the terminal shows a warning once; a lost node is named."""

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine import hookimpl
from skyrl_engine.cli.training import warnings_to
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.contracts.kinds.observer import StepFinished
from skyrl_engine.errors import EngineError, WorkerError
from skyrl_engine.training.sft.trainer import run_sft
from skyrl_engine.workers.ray_cluster import connect, import_ray

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves sockets of its own to the garbage collector

TALKATIVE = """
import ctypes, logging, os, sys, warnings
import torch.distributed as dist
from skyrl_engine import loss

logging.getLogger(__name__).info("the loss is imported")

@loss(needs=("logprobs",))
def talkative(tokens, config):
    rank = dist.get_rank()
    print(f"printed by {rank}")
    print(f"to stderr by {rank}", file=sys.stderr)
    ctypes.CDLL(None).printf(f"from C by {rank}\\n".encode())
    logging.getLogger("my.loss").info("logged by %d", rank)
    logging.getLogger("my.loss").warning("a warning that all log")
    warnings.warn("a warning that all give", stacklevel=1)
    if rank == 1 and os.path.exists(DIES):
        print("the last words of 1", flush=True)
        os._exit(7)
    return -tokens.logprobs
"""


@pytest.fixture
def configure_loss(configure: Callable[..., ResolvedConfig], tmp_path: Path) -> Callable[..., ResolvedConfig]:
    """Two ranks with a loss that says something in every way; the second dies if the file `dies` is there."""
    file = tmp_path / "talkative.py"
    file.write_text(TALKATIVE.replace("DIES", repr(str(tmp_path / "dies"))))

    def make(**run: Any) -> ResolvedConfig:
        return configure(
            run={"launch": "ray", "ranks": 2, **run}, training={"steps": 2, "batch_size": 4}, loss={"use": f"{file}:talkative"}
        )

    return make


@pytest.fixture
def _ray() -> Iterator[None]:
    """One Ray for both runs: starting it takes seconds."""
    ray = import_ray()
    connect(ray, None, 2)
    yield
    ray.shutdown()


def log_of(resolved: ResolvedConfig) -> str:
    return Path(resolved.config.run.directory or "", "run.log").read_text()


@pytest.mark.nightly
@pytest.mark.usefixtures("_ray")
def test_all_that_ranks_say_is_in_the_log_and_warnings_once_on_the_terminal(
    configure_loss: Callable[..., ResolvedConfig], tmp_path: Path
) -> None:
    """In one run that goes well, and in one whose second rank ends itself: its last words are there, and its place."""
    resolved = configure_loss(directory=str(tmp_path / "well"))
    shown: list[str] = []
    with warnings_to(shown.append):
        run_sft(resolved)
    log = log_of(resolved)
    places = dict(re.findall(r"rank (\d): on .*, pid (\d+), CPU, data-parallel \d of 2", log))
    assert len(set(places.values())) == 2
    for rank, process in places.items():
        label = re.escape(f"rank {rank} ({socket.gethostname()}, pid {process}) ")
        for line in (
            f"INFO skyrl_engine.ranks: {label}output: printed by {rank}",
            f"INFO skyrl_engine.ranks: {label}output: to stderr by {rank}",
            f"INFO skyrl_engine.ranks: {label}output: from C by {rank}",
            f"INFO skyrl_engine.ranks: {label}my.loss: logged by {rank}",
            f"WARNING skyrl_engine.ranks: {label}my.loss: a warning that all log",
            f"WARNING skyrl_engine.ranks: {label}warnings: UserWarning: a warning that all give",
        ):
            assert re.search(line, log), line
        assert re.search(rf"{label}skyrl_engine_local_\w+: the loss is imported", log)
    for warning in ("a warning that all log", "a warning that all give"):
        assert len([line for line in shown if warning in line]) == 1, shown

    (tmp_path / "dies").touch()
    resolved = configure_loss(directory=str(tmp_path / "dying"))
    with pytest.raises(WorkerError, match=rf"rank 1 died during run: .*it was on {re.escape(socket.gethostname())}.*pid \d+, CPU"):
        run_sft(resolved)
    assert "output: the last words of 1" in log_of(resolved)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each, both on this machine."""
    ray = import_ray()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class LoseNode:
    """An observer that takes a node away after the first step."""

    def __init__(self, lose: Callable[[], None]) -> None:
        self._lose = lose

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self._lose()


@pytest.mark.nightly
def test_the_loss_of_a_node_is_named_with_its_ranks(configure: Callable[..., ResolvedConfig], cluster: Any) -> None:
    node = cluster.add_node(num_cpus=1)
    resolved = configure(run={"launch": "ray", "ranks": 2, "ray_address": cluster.address})
    observer = LoseNode(lambda: cluster.remove_node(node, allow_graceful=False))
    with pytest.raises(EngineError, match=r"the node .* was lost during \w+, and rank [01] with it") as caught:
        run_sft(resolved, observers=[observer])
    assert "resume from the latest checkpoint" in caught.value.remedy
