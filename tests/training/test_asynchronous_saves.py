"""Checkpoints that are written while training goes on: the bytes of those that a run waits for, whole or absent whenever the run ends."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import frozen
from by_day import now
from safetensors.numpy import load_file

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.engine.engine import Engine
from skyrl_engine.errors import CheckpointError, ModelError
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import SftTrainer, run_sft
from skyrl_engine_fsdp import checkpoint as fsdp_checkpoint

Configure = Callable[..., ResolvedConfig]

SETTINGS: Final[dict[str, Any]] = {"checkpoint": {"every": 3, "keep": None}, "training": {"steps": 7}}
BEHIND: Final[dict[str, Any]] = {**SETTINGS, "checkpoint": {**SETTINGS["checkpoint"], "asynchronous": True}}


def states(directory: Path) -> dict[str, bytes]:
    """The files of the ranks' states and the trainers' documents of all checkpoints, which are whole."""
    store = CheckpointStore(directory / "checkpoints")
    for saved in store.all():
        saved.verify()
    assert not store.list_left_overs()
    files = [path for saved in store.all() for path in [*saved.state.rglob("*"), saved.path / "trainer.json"] if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def losses(directory: Path) -> list[float]:
    return [record["metrics"]["loss"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]


def weights(directory: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(directory / "model" / "model.safetensors").items()}


@frozen
class Results:
    """The files of a run's checkpoints, its losses by step, and the bytes of the weights it ended with."""

    states: dict[str, bytes]
    losses: list[float]
    weights: dict[str, bytes]

    @classmethod
    def of(cls, directory: Path) -> "Results":
        return cls(states(directory), losses(directory), weights(directory))


@pytest.fixture(scope="module")
def kept() -> list[Results]:
    return []


@pytest.fixture
def waited_for(configure: Configure, kept: list[Results]) -> Results:
    """The results of a run that waits for its checkpoints, which is made once."""
    if not kept:
        kept.append(Results.of(run_sft(configure("waited-for", **SETTINGS)).directory))
    return kept[0]


def test_a_run_has_the_bytes_of_one_that_waits_for_its_checkpoints(configure: Configure, waited_for: Results) -> None:
    """And its records say how long it stood still: less than a checkpoint took."""
    behind = run_sft(configure("behind", **BEHIND)).directory
    assert Results.of(behind) == waited_for
    assert {name.split("/")[1] for name in states(behind)} == {"step-00000003", "step-00000006", "step-00000007"}
    saved = [record for record in read_metrics(behind / "metrics.jsonl") if record["kind"] == "checkpoint"]
    assert [record["step"] for record in saved] == [3, 6, 7]
    assert all(0 < record["blocked_seconds"] <= record["seconds"] for record in saved)


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no rank's thread write before the event is set."""
    let_go, save = threading.Event(), fsdp_checkpoint.state_dict_saver.save

    def save_later(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert let_go.wait(60)
        return save(*arguments, **options)

    monkeypatch.setattr(fsdp_checkpoint.state_dict_saver, "save", save_later)
    return let_go


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable[[], None]) -> None:
    """Do something when the trainer begins a step."""
    step = SftTrainer.step

    def call(self: SftTrainer, at: int) -> Any:
        if at == number:
            do()
        return step(self, at)

    monkeypatch.setattr(SftTrainer, "step", call)


def before_staging(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], None]) -> None:
    """Do something when the checkpoint of a step is the next that begins; those before it are whole."""
    save_async = Engine.save_async

    def save(self: Engine, directory: Path) -> Any:
        if self.step == step:
            do()
        return save_async(self, directory)

    monkeypatch.setattr(Engine, "save_async", save)


def test_steps_are_taken_before_a_checkpoint_is_written_and_it_does_not_count_till_then(
    configure: Configure, waited_for: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write is held up to step 6: the state of step 3 is written then, as it was after step 3."""
    let_go, seen = hold_writes(monkeypatch), list[list[int]]()
    resolved = configure("behind", **BEHIND)
    store = CheckpointStore(Path(resolved.config.run.directory or "") / "checkpoints")

    def look() -> None:
        seen.append([saved.step for saved in store.all()])
        let_go.set()

    at_step(monkeypatch, 6, look)
    behind = run_sft(resolved).directory
    assert seen == [[]]
    assert Results.of(behind) == waited_for


@pytest.mark.nightly
def test_the_next_save_waits_for_the_one_under_way(
    configure: Configure, waited_for: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint of every step the second one begins while the first is held up: all are written, in their order."""
    let_go, begun = hold_writes(monkeypatch), list[int]()
    save_async = Engine.save_async

    def save(self: Engine, directory: Path) -> Any:
        begun.append(self.step)
        if len(begun) == 1:
            threading.Timer(0.2, let_go.set).start()
        else:
            assert let_go.is_set(), "it began beside the one before it"
        return save_async(self, directory)

    monkeypatch.setattr(Engine, "save_async", save)
    changed = {**BEHIND, "checkpoint": {**BEHIND["checkpoint"], "every": 1}}
    behind = run_sft(configure("behind", **changed)).directory
    assert begun == [1, 2, 3, 4, 5, 6, 7]
    recorded = [record["step"] for record in read_metrics(behind / "metrics.jsonl") if record["kind"] == "checkpoint"]
    assert recorded == begun
    of_both = waited_for.states
    assert {name: content for name, content in states(behind).items() if name in of_both} == of_both


@pytest.mark.nightly
def test_a_run_that_fails_first_makes_the_checkpoint_under_way_whole(
    configure: Configure, waited_for: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = hold_writes(monkeypatch)

    def fail() -> None:
        let_go.set()
        raise ModelError("pulled the plug", remedy="put it in")

    resolved = configure("behind", **BEHIND)
    with monkeypatch.context() as failing:
        at_step(failing, 5, fail)
        with pytest.raises(ModelError, match="pulled the plug"):
            run_sft(resolved)
    behind = run_sft(resolved, resume=True).directory
    assert Results.of(behind) == waited_for


def test_a_disk_that_is_full_ends_the_run_with_the_cause_and_the_checkpoint_before_counts(
    configure: Configure, waited_for: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on file sizes makes the thread's own writes fail halfway, as a full disk does; resuming with space back is exact."""
    resolved = configure("behind", **BEHIND)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with monkeypatch.context() as limiting:
            before_staging(limiting, 6, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, before[1])))
            with pytest.raises(
                CheckpointError, match=f"step 6 could not be written.*{os.strerror(errno.EFBIG)}.*step-00000003 is whole"
            ):
                run_sft(resolved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    store = CheckpointStore(Path(resolved.config.run.directory or "") / "checkpoints")
    assert [saved.step for saved in store.all()] == [3]
    assert not store.list_left_overs()
    behind = run_sft(resolved, resume=True).directory
    assert Results.of(behind) == waited_for


RUNNER: Final = """
import os
import signal
import sys

from skyrl_engine.cli.app import main
from skyrl_engine.run import checkpoint
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.training.sft.trainer import SftTrainer
from skyrl_engine.workers import staged_save
from skyrl_engine_fsdp import checkpoint as of_fsdp
from skyrl_engine_fsdp.pieces import PiecesWriter

file, moment = sys.argv[1], sys.argv[2]
staged = [False]


def kill_around(owner, name, before=None, after=None):
    original = getattr(owner, name)

    def call(*arguments, **options):
        if moment == before and staged[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if moment == after and staged[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, call)


stage = of_fsdp.ShardedTrainingState.stage


def note(self, directory, steps_done, *arguments):
    staged[0] = steps_done == 6
    return stage(self, directory, steps_done, *arguments)


of_fsdp.ShardedTrainingState.stage = note
kill_around(PiecesWriter, "write_data", before="before pieces", after="after pieces")
kill_around(PiecesWriter, "finish", before="before the list", after="after the list")
kill_around(staged_save, "sum_files", before="before sums", after="after sums")
kill_around(SftTrainer, "step", before="before a step", after="after a step")
kill_around(CheckpointStore, "commit", before="before commit", after="after commit")
kill_around(checkpoint, "sync_tree", before="before sync", after="after sync")
kill_around(CheckpointStore, "_publish", before="before publishing")
kill_around(checkpoint, "write_durably", before="before the pointer", after="after the pointer")
raise SystemExit(main(["run", file, "checkpoint.resume=true", "--quiet"]))
"""
"""Runs the configuration file `argv[1]`, and kills its own process at the moment `argv[2]`, once the state of step 6 is being staged."""

MOMENTS = [
    *(
        f"{when} {what}"
        for what in ("pieces", "the list", "sums", "a step", "commit", "sync", "the pointer")
        for when in ("before", "after")
    ),
    "before publishing",
]


def run(folder: Path, resolved: ResolvedConfig, moment: str) -> int:
    file = folder / "run.toml"
    file.write_text(resolved.to_toml())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUNNER, str(file), moment]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
    return ended.returncode


@pytest.mark.parametrize("moment", now(MOMENTS, "after pieces"))
def test_killed_at_any_moment_a_run_resumes_to_the_same_bytes(
    configure: Configure, waited_for: Results, tmp_path: Path, moment: str
) -> None:
    resolved = configure("killed", **BEHIND)
    assert run(tmp_path, resolved, moment) == -signal.SIGKILL
    store = CheckpointStore(tmp_path / "killed" / "checkpoints")
    whole = [saved.step for saved in store.all()]
    assert whole in ([3], [3, 6])
    # until the pointer names it, a whole checkpoint is not the one to resume from
    assert store.at(None).step == (3 if moment == "before the pointer" else whole[-1])
    for saved in store.all():
        saved.verify()
    assert run_sft(resolved, resume=True).step == 7
    assert Results.of(tmp_path / "killed") == waited_for
