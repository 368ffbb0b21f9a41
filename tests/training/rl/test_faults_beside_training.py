"""Faults while a run samples up to two steps ahead: its controller, its replicas and its environments are killed again and again."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rl_runs import Rl, check_ledger, kill_run, numbers_without_waits, weights_of

from skyrl_engine.rollout.journal_index import read_groups, read_index
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.workers.replicas import ReplicaHost

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("SKYRL_ENGINE_KILLS", "50"))
SEED = int(os.environ.get("SKYRL_ENGINE_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)

MOMENTS = {
    "sampling": 60,
    "a record half written": 4,
    "a group recorded": 6,
    "learning": 2,
    "learned": 2,
    "a step noted": 2,
    "weights gathered": 2,
    "weights given": 2,
    "saving": 2,
    "a checkpoint's state": 2,
}
"""Moments, and how often each comes at most before the kill: a life goes on for few steps, so that there are lives enough."""

JITTER = {"jitter": 0.03}
KEYS = ("rl.staleness=2", "checkpoint.every=1", "rollouts.workers=2")


@pytest.mark.parametrize("in_flight", [False, True], ids=["drained", "in flight"])
def test_a_controller_that_is_killed_at_random_moments(rl: Rl, tables_of: Callable[..., dict[str, Any]], in_flight: bool) -> None:
    """No finished group is lost, none is trained on twice, no task is left out; where updates wait, no bit tells that there were kills."""
    print(f"SKYRL_ENGINE_KILL_SEED={SEED} SKYRL_ENGINE_KILLS={KILLS}")
    draw = np.random.default_rng([SEED, in_flight])
    steps = KILLS + 5
    keys = (*KEYS, f"rl.steps={steps}", f"rl.in_flight_updates={str(in_flight).lower()}")
    directory = Path(tables_of("parts")["run"]["directory"])
    finished: dict[int, list[bytes]] = {}
    for number in range(KILLS):
        moment = list(MOMENTS)[draw.integers(len(MOMENTS))]
        count = int(draw.integers(1, MOMENTS[moment] + 1))
        later = 0.0 if moment == "a record half written" else float(draw.choice([0.0, draw.uniform(0.0, 0.3)]))
        print(f"kill {number}: {later:.3f} s after {moment}, {count}")
        kill_run(tables_of("parts", environment=JITTER), keys, moment, count, later=later, forks=True)
        finished |= dict(read_usable(directory))
    run = run_rl(rl("parts", *keys, environment=JITTER), resume=True).directory
    check_ledger(run, 2)
    trained = [ticket for tickets in read_index(run / "rollouts").trained.values() for ticket in tickets]
    assert sorted(trained) == list(range(3 * steps)), "every ticket in one step"
    final = {group.ticket: tokens_of(group) for group in read_groups(run / "rollouts")}
    assert len(finished) > KILLS
    assert {ticket: final[ticket] for ticket in finished} == finished, "what had ended was not sampled again"
    if not in_flight:
        whole = run_rl(rl("whole", *keys, environment=JITTER)).directory
        assert weights_of(run) == weights_of(whole)
        assert numbers_without_waits(run) == numbers_without_waits(whole)


def read_usable(directory: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yield ticket and tokens of the groups in the journal that a resume takes: those of no later weights than the checkpoint's."""
    names = [folder.name.removeprefix("step-") for folder in (directory / "checkpoints").glob("step-*")]
    step = max((int(name) for name in names if name.isdigit()), default=0)
    if not (directory / "rollouts").exists():
        return
    for group in read_groups(directory / "rollouts"):
        if max(int(attempt.versions.versions.max(initial=0)) for attempt in group.trajectories) <= step:
            yield group.ticket, tokens_of(group)


def tokens_of(group: Any) -> list[bytes]:
    return [attempt.token_ids.tobytes() for attempt in group.trajectories]


def test_replicas_and_environments_that_are_killed_all_the_while_change_no_bit(rl: Rl, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("rl.staleness=2", "rl.in_flight_updates=false", "rl.steps=12", "rollouts.workers=3", "generator.replicas=2")
    keys += ("rollouts.retries=1000",)
    environment = {"jitter": 0.2}
    whole = run_rl(rl("whole", *keys, environment=environment)).directory
    killed = {"environment": 0, "replica": 0}
    ended = threading.Event()
    draw = random.Random(SEED)
    print(f"SKYRL_ENGINE_KILL_SEED={SEED}")
    hosts: list[ReplicaHost] = []
    start = ReplicaHost.start

    def start_and_keep(*arguments: Any, **options: Any) -> ReplicaHost:
        hosts.append(start(*arguments, **options))
        return hosts[-1]

    monkeypatch.setattr(ReplicaHost, "start", start_and_keep)

    def kill_at_random() -> None:
        while not ended.wait(draw.uniform(1.0, 4.0)):
            replica = draw.random() < 0.3
            if pids := [*(list_sampling(hosts) if replica else find_children("episode_process"))]:
                os.kill(draw.choice(pids), signal.SIGKILL)
                killed["replica" if replica else "environment"] += 1

    killer = threading.Thread(target=kill_at_random)
    killer.start()
    try:
        run = run_rl(rl("killed", *keys, environment=environment)).directory
    finally:
        ended.set()
        killer.join()
    print(f"killed: {killed}")
    assert all(killed.values()), killed
    assert weights_of(run) == weights_of(whole)
    assert numbers_without_waits(run) == numbers_without_waits(whole)


def list_sampling(hosts: Sequence[ReplicaHost]) -> Iterator[int]:
    """Yield the ids of replicas that have answered since they last died: four deaths in a row without an answer end a run."""
    for host in hosts:
        for replica, deaths in zip(host._replicas, host._deaths, strict=False):
            if not deaths and "start" not in replica.owed:
                yield replica.process.child.pid  # type: ignore[attr-defined]


def find_children(module: str) -> Iterator[int]:
    """Yield the ids of this process's children that run a module."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and module.encode() in (folder / "cmdline").read_bytes():
                yield int(folder.name)
        except OSError:
            continue
