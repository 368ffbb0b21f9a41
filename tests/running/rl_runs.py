"""A tiny model, an environment of two turns, and runs by reinforcement over them: everything real, everything on CPU, in this process."""

import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from attrs import define, field

from skyrl_engine.config import ResolvedConfig, load, resolve
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.plan import Plan
from skyrl_engine.engine.sampler import Sampler
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.rollout.journal import Journal
from skyrl_engine.rollout.journal_index import read_groups, read_index
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.testing.templates import TEMPLATES
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.rl.trainer import RlTrainer
from skyrl_engine.workers.replica_launch import LocalLauncher, LocalProcess
from skyrl_engine.workers.replica_process import serve_until_gone

WORLD = '''
"""Two turns: letters are worth something, and the answers of seed-dependent length make attempts unequal. Some attempts fail."""
import os
import signal
import time
from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task
from attrs import frozen, field


@frozen
class Options:
    tasks: int = field(default=7, kw_only=True)
    turns: int = field(default=2, kw_only=True)
    constant: float | None = field(default=None, kw_only=True)
    failing: bool = field(default=False, kw_only=True)
    delay: bool = field(default=False, kw_only=True)
    jitter: float = field(default=0.0, kw_only=True)  # seconds at most, other ones in every run
    words: int = field(default=6, kw_only=True)  # of an answer, at most
    teaches: bool = field(default=False, kw_only=True)  # every answer has the column teacher_logprobs
    dies: str = field(default="", kw_only=True)  # kills itself in a second turn, once for every byte of this file


class Episode:
    def __init__(self, options, task, seed):
        self.options, self.task, self.seed = options, task, seed

    def begin(self):
        return ()

    def step(self, action):
        if self.options.delay:
            time.sleep((self.seed >> 3) % 5 / 200)
        time.sleep(int.from_bytes(os.urandom(2)) / 2**16 * self.options.jitter)
        if self.options.failing and self.task.key == "2" and self.seed % 3 == 0:
            raise ValueError("this one fails")
        if self.options.dies and action.turn and os.path.getsize(self.options.dies):
            os.truncate(self.options.dies, os.path.getsize(self.options.dies) - 1)
            os.kill(os.getpid(), signal.SIGKILL)
        ids = action.token_ids
        worth = sum(token % 7 for token in ids) / (1 + len(ids))
        if self.options.constant is not None:
            worth = self.options.constant
        answer = {"answer": str(int(worth))}
        columns = {"teacher_logprobs": tuple(-(1 + token % 5) / 4 for token in ids)} if self.options.teaches else {}
        if action.turn + 1 >= self.options.turns:
            return StepResult(worth, success=worth > 3, info=answer, columns=columns)
        more = {"role": "user", "content": "more" * (1 + self.seed % self.options.words)}
        return StepResult(worth / 4, done=False, messages=(more,), info=answer, columns=columns)

    def close(self):
        pass


class World:
    def __init__(self, options):
        self.options = options
        columns = ("teacher_logprobs",) if options.teaches else ()
        self.claims = EnvironmentClaims(max_turns=options.turns, columns=columns)

    def tasks(self, split):
        count = self.options.tasks if split == "train" else 2
        start = 0 if split == "train" else 1000
        return [Task(str(start + n), messages=({"role": "user", "content": "go " + "on " * (n % 3)},)) for n in range(count)]

    def open(self, task, seed):
        return Episode(self.options, task, seed)


class Plugin:
    @hookimpl
    def skyrl_engine_config_schema(self):
        return Options

    @hookimpl
    def skyrl_engine_make_environment(self, config, context):
        return World(config)


world = Plugin()
'''

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
}

Rl = Callable[..., ResolvedConfig]

BESIDE_TRAINING = frozenset(
    {
        *("async/staleness_mean", "async/staleness_max", "async/versions_per_attempt"),
        *("async/waited_seconds", "async/sampler_waited_seconds", "async/drain_seconds", "time/wait"),
        *("async/groups_ready", "async/groups_running", "async/attempts_at_generator", "async/attempts_at_environment"),
        *("async/tokens_of_staleness/0", "async/tokens_of_staleness/1"),
        *("policy/gap_stale_mean", "policy/gap_stale_max", "policy/gap_stale_k3"),
    }
)
"""Metrics of a run with `rl.staleness = 1` alone."""


def write_world(directory: Path, **settings: Any) -> Path:
    """Write `model/` and `world.py` into a directory. Many tokens end a turn, so that turns end early."""
    tokenizer = TEMPLATES["chatml"].tokenizer()
    write_model(directory / "model", tokenizer=tokenizer, **{**SIZES, **settings})
    tokenizer.save_pretrained(directory / "model")
    make_parts_differ(directory / "model")
    ends = [tokenizer.eos_token_id, *range(60)]
    (directory / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (directory / "world.py").write_text(WORLD)
    return directory


class StopHereError(Exception):
    """Ends a run from within."""


@define
class Seen:
    """Batches for `_learn`, step by step; `also(trainer, plan, number)` is called before it."""

    plans: dict[int, Plan] = field(factory=dict)
    groups: dict[int, tuple[Group, ...]] = field(factory=dict)
    also: Callable[[RlTrainer, Plan, int], None] | None = None


def steps_of(directory: Path) -> list[dict[str, Any]]:
    """The records of all steps of a run."""
    return [record for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]


def weights_of(directory: Path) -> bytes:
    return (directory / "model" / "model.safetensors").read_bytes()


def numbers_of(directory: Path) -> list[dict[str, float]]:
    """The metrics of all steps, but for those of time."""
    without = ("time/", "rollout/tokens_per", "tokens_per")
    return [
        {name: value for name, value in record["metrics"].items() if not name.startswith(without)} for record in steps_of(directory)
    ]


def numbers_without_waits(directory: Path) -> list[dict[str, float]]:
    """The metrics of all steps, but for those of time, of waiting and of what was under way at a moment."""
    of_the_clock = ("async/groups_", "async/attempts_at_")
    return [
        {name: value for name, value in row.items() if not name.endswith("_seconds") and not name.startswith(of_the_clock)}
        for row in numbers_of(directory)
    ]


def check_ledger(directory: Path, staleness: int) -> None:
    """Hold a run to the ledger's promises: every group in one step, none older than the bound, by what the journal says of its tokens."""
    index = read_index(directory / "rollouts")
    trained = [ticket for tickets in index.trained.values() for ticket in tickets]
    assert len(trained) == len(set(trained)) > 0
    groups = {group.ticket: group for group in read_groups(directory / "rollouts")}
    for step, tickets in index.trained.items():
        for ticket in tickets:
            assert step - 1 - staleness <= groups[ticket].start_version <= step - 1
            for attempt in groups[ticket].finished:
                assert attempt.versions.versions.min() >= groups[ticket].start_version
                assert attempt.versions.versions.max() <= step - 1
    assert max(row["metrics"]["async/staleness_max"] for row in steps_of(directory)) <= staleness


def kill_run(
    tables: dict[str, Any], overrides: Sequence[str], moment: str, count: int, *, later: float = 0.0, forks: bool = False
) -> None:
    """Run, or go on with, a run in a process of its own, and SIGKILL that when `moment` comes the `count`-th time, or so many seconds later.

    `forks` starts replicas by forking that process, which has imported what they need.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["transformers.modeling_utils", "skyrl_engine_fsdp.backend", "skyrl_engine_generators.generator", __name__]
    )
    process = context.Process(target=_run_until, args=(tables, tuple(overrides), moment, count, later, forks))
    process.start()
    process.join(600)
    assert process.exitcode == -signal.SIGKILL, f"{moment} did not come {count} times: {process.exitcode}"


@define
class Forked:
    """A process that was forked, as `subprocess.Popen` shows one."""

    pid: int
    returncode: int | None = None

    def wait(self, timeout: float = math.inf) -> int:
        until = time.monotonic() + timeout
        while self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                raise subprocess.TimeoutExpired("a replica", timeout)
            else:
                time.sleep(0.01)
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_replica(self: LocalLauncher, number: int, output: Path) -> LocalProcess:
    """Start a replica without a Python of its own: it keeps nothing of this process but what was imported."""
    ours, theirs = socket.socketpair()
    with output.open("ab") as log, theirs:
        if pid := os.fork():
            return LocalProcess(cast("subprocess.Popen[bytes]", Forked(pid)), ours, self.devices[number])
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        end = os.dup2(theirs.fileno(), 3)
        os.closerange(4, 4096)
        try:
            serve_until_gone(Connection(end))
        finally:
            os._exit(1)


def _run_until(tables: dict[str, Any], overrides: Sequence[str], moment: str, count: int, later: float, forks: bool) -> None:
    torch.set_num_threads(1)
    if forks:
        setattr(LocalLauncher, "launch", fork_replica)  # noqa: B010 - a method is not assigned to
    where, name, torn = MOMENTS[moment]
    right, left = getattr(where, name), [count]

    def count_calls(self: Any, *arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and later:
            threading.Timer(later, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if left[0] or later:
            return right(self, *arguments, **named)
        if torn == "half":
            data = self._buffer.getvalue()
            self._file.write(data[: len(data) // 2])
        if torn == "after":
            right(self, *arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(where, name, count_calls)
    run_rl(resolve(load(tables, list(overrides))), resume=True)


MOMENTS: dict[str, tuple[Any, str, str]] = {
    "sampling": (Sampler, "poll", "before"),
    "a record half written": (Journal, "_flush", "half"),
    "a group recorded": (Journal, "append", "after"),
    "learning": (RlTrainer, "_learn", "before"),
    "learned": (RlTrainer, "_learn", "after"),
    "a step noted": (Journal, "record_step", "after"),
    "publishing": (Sampler, "update", "before"),
    "weights gathered": (Sampler, "write", "after"),
    "weights given": (Sampler, "take", "after"),
    "saving": (Engine, "save", "after"),
    "a checkpoint's state": (RlTrainer, "state", "after"),
}
"""Moments to kill a run: before a call, after it, or with half of what it writes on the disk."""
