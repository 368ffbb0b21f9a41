"""Checkpoints survive crashes and full disks: the previous one stays whole, `latest` points at it, damage is seen."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_engine import __version__
from skyrl_engine.errors import CheckpointError, WorkerError
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.workers.listing import list_files


def state_of(step: int) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "shard").mkdir()
        (directory / "shard" / "rank0.bin").write_bytes(bytes([step % 256]) * 5000)

    return write


def save(store: CheckpointStore, step: int) -> None:
    store.save(step, state_of(step), {"trainer.json": {"step": step}})


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_a_checkpoint_is_written_read_and_pointed_at(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    save(store, 10)
    latest = store.latest()
    assert latest is not None
    latest.verify()
    assert latest.step == 10
    assert latest.document("trainer.json") == {"step": 10}
    assert (latest.state / "shard" / "rank0.bin").read_bytes() == bytes([10]) * 5000
    assert names(store.directory) == ["latest", "step-00000010"]


def test_the_newest_are_kept_and_later_ones_of_an_abandoned_continuation_are_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert [checkpoint.step for checkpoint in store.all()] == [3, 4]
    (tmp_path / "latest").write_text("step-00000003\n")  # the user goes back
    assert store.at(None).step == 3
    save(store, 5)
    assert [checkpoint.step for checkpoint in store.all()] == [4, 5]
    (tmp_path / "latest").write_text("step-00000004\n")
    store.save(5, lambda directory: (directory / "again").touch(), {})
    assert (store.at(5).state / "again").exists()
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000005"]


def test_keep_none_keeps_all(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    for step in (1, 2, 3):
        save(store, step)
    assert [checkpoint.step for checkpoint in store.all()] == [1, 2, 3]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        store.at(None)
    save(store, 3)
    save(store, 7)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5.*steps 3, 7"):
        store.at(5)


def test_a_pointer_that_leads_nowhere_falls_back_to_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 3)
    (tmp_path / "latest").write_text("step-00000099\n")
    assert store.at(None).step == 3
    assert "step-00000099" in caplog.text


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"", b"../../elsewhere\n", b"step-0000000"])
def test_a_pointer_of_garbage_falls_back_to_the_newest(tmp_path: Path, garbage: bytes) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 3)
    save(store, 7)
    (tmp_path / "latest").write_bytes(garbage)
    assert store.at(None).step == 7


@pytest.mark.parametrize("version", ["[]", "{}", '{"engine": 2}', '{"engine": "new"}'])
def test_a_version_of_garbage_is_damage(tmp_path: Path, version: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 3)
    checkpoint = store.at(3)
    (checkpoint.path / "version.json").write_text(version)
    (checkpoint.path / "files.json").unlink()
    (checkpoint.path / "files.json").write_text(json.dumps(list_files(checkpoint.path)))
    with pytest.raises(CheckpointError, match=r"damaged: version\.json"):
        checkpoint.verify()


def test_a_rank_that_died_during_a_save_is_named_with_what_helps(tmp_path: Path) -> None:
    """Free space does not."""

    def die(_: Path) -> None:
        raise WorkerError("rank 1 died during save: killed by SIGKILL", rank=1, remedy="Look at memory, then resume")

    with pytest.raises(CheckpointError, match="rank 1 died during save") as caught:
        CheckpointStore(tmp_path).save(3, die, {})
    assert caught.value.remedy == "Look at memory, then resume"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: (path / "state/shard/rank0.bin").unlink(), "state/shard/rank0.bin is missing"),
        (lambda path: (path / "state/shard/rank0.bin").write_bytes(b"x" * 4999), "has 4999 bytes instead of 5000"),
        (lambda path: (path / "state/shard/rank0.bin").write_bytes(b"x" * 5000), "the content of state/shard/rank0.bin differs"),
        (lambda path: (path / "trainer.json").write_text("{}"), "trainer.json has"),
        (lambda path: (path / "files.json").unlink(), "files.json cannot be read"),
        (lambda path: (path / "files.json").write_text("[1]"), "files.json cannot be read"),
        (lambda path: (path / "files.json").write_bytes(b"\xff\x00garbage"), "files.json cannot be read"),
        (lambda path: (path / "files.json").write_text('{"trainer.json": 1}'), "state/shard/rank0.bin is not one of its files"),
        (lambda path: (path / "files.json").write_text("{}"), "state/shard/rank0.bin is not one of its files"),
        (lambda path: (path / "state/more.bin").touch(), "state/more.bin is not one of its files"),
    ],
)
def test_damage_is_named_together_with_a_way_out(tmp_path: Path, damage: Callable[[Path], object], named: str) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    save(store, 2)
    damage(store.at(2).path)
    with pytest.raises(CheckpointError, match=named) as caught:
        store.at(2).verify()
    assert "step-00000001" in caught.value.remedy
    assert caught.value.remedy.endswith("and resume")
    store.at(1).verify()


def test_a_damaged_checkpoint_that_is_the_only_one_leads_to_a_copy_or_a_new_run(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=None)
    save(store, 1)
    (store.at(1).path / "files.json").write_text("[]")
    with pytest.raises(CheckpointError) as caught:
        store.at(1).verify()
    assert caught.value.remedy == "Restore it from a copy, or start a new run"


class FullDisk:
    """Makes the n-th call of one of the calls that reach the disk fail, as a full disk does."""

    def __init__(self, fail_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.fail_at = fail_at
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (Path, "write_text")):
            monkeypatch.setattr(owner, name, self.failing(getattr(owner, name)))

    def failing(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **keywords: object) -> object:
            self.calls += 1
            if self.calls == self.fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **keywords)

        return call


def test_a_disk_that_fills_at_any_write_leaves_the_previous_checkpoint_whole_and_pointed_at(tmp_path: Path) -> None:
    causes: list[str] = []
    for fail_at in itertools.count(1):
        store = CheckpointStore(tmp_path / str(fail_at), keep=1)
        save(store, 1)
        failure = None
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = FullDisk(fail_at, monkeypatch)
            try:
                save(store, 2)
            except CheckpointError as error:
                failure = error
        if disk.calls < fail_at:
            break
        store.at(None).verify()
        store.at(1).verify()
        assert not [name for name in names(store.directory) if re.fullmatch(r"\.step-.*\.partial", name)]
        if failure is None:  # the disk refused to forget the old checkpoint, which costs space and no data
            assert store.at(None).step == 2
        else:
            causes.append(failure.cause)
            assert "resume" in failure.remedy
        save(store, 2)  # space is back
        store.at(None).verify()
        assert [checkpoint.step for checkpoint in store.all()] == [2]
    assert len(causes) > 12
    assert all("No space left on device" in cause for cause in causes)
    # Only the very last call, which makes the new pointer itself durable, can fail with the new checkpoint in place.
    assert all("step-00000001 is whole" in cause for cause in causes[:-1])
    assert "step-00000002 is whole" in causes[-1]


def test_a_rank_that_cannot_write_its_part_is_a_checkpoint_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def fails(directory: Path) -> None:
        (directory / "half").write_bytes(b"x")
        raise WorkerError("rank 3 failed: No space left on device", rank=3, remedy="Look", details=["traceback"])

    with pytest.raises(CheckpointError, match=r"rank 3 failed: No space left on device.*step-00000001 is whole") as caught:
        store.save(2, fails, {})
    assert caught.value.details == ("traceback",)
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_a_really_full_device(tmp_path: Path) -> None:
    """/dev/full answers every write with ENOSPC, as a full file system does."""
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def fills(directory: Path) -> None:
        (directory / "weights").symlink_to("/dev/full")
        (directory / "weights").write_bytes(b"x" * 100)

    with pytest.raises(CheckpointError, match="No space left on device"):
        store.save(2, fills, {})
    store.at(None).verify()
    assert names(tmp_path) == ["latest", "step-00000001"]


WRITER = """
import sys
from pathlib import Path
from skyrl_engine.run.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
store.remove_left_overs()
latest = store.latest()
step = latest.step if latest else 0
def state(directory):
    for rank in range(8):
        (directory / f"rank{rank}.bin").write_bytes(step.to_bytes(8, "little") * 2000)
print("ready", flush=True)
while True:
    step += 1
    store.save(step, state, {"trainer.json": {"step": step}})
"""


def test_killed_at_any_moment_the_latest_checkpoint_is_whole_and_nothing_is_left_over(tmp_path: Path) -> None:
    previous = 0
    for attempt in range(6):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.03 + 0.037 * attempt)
            process.send_signal(signal.SIGKILL)
        store = CheckpointStore(tmp_path, keep=2)
        store.remove_left_overs()
        assert not [name for name in names(tmp_path) if name.startswith(".")]
        latest = store.latest()
        if latest is not None:
            for checkpoint in store.all():
                checkpoint.verify()
                assert checkpoint.document("trainer.json") == {"step": checkpoint.step}
            assert latest.step >= previous
            previous = latest.step
    assert previous > 0


def test_left_overs_are_removed_and_foreign_files_are_not(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    shutil.copytree(store.at(1).path, tmp_path / ".step-00000002.partial")
    (tmp_path / ".latest.partial").write_text("step-0")
    (tmp_path / "notes.txt").write_text("mine")
    store.remove_left_overs()
    assert names(tmp_path) == ["latest", "notes.txt", "step-00000001"]


def test_the_listing_names_every_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    listing = json.loads((store.at(1).path / "files.json").read_text())
    assert set(listing) == {"state/shard/rank0.bin", "trainer.json", "version.json"}
    assert listing["state/shard/rank0.bin"]["bytes"] == 5000


@pytest.mark.parametrize(
    ("recorded", "series", "remedy"),
    [(None, "0.1", ">=0.1,<0.2"), ({"engine": "0.1.7"}, "0.1", ">=0.1,<0.2"), ({"engine": "7.9.0rc1"}, "7.9", ">=7.9,<7.10")],
)
def test_a_checkpoint_of_another_engine_is_refused_with_the_one_that_reads_it(
    tmp_path: Path, recorded: dict[str, str] | None, series: str, remedy: str
) -> None:
    """Versions before 0.2 wrote no version.json."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    checkpoint = store.at(1)
    (checkpoint.path / "version.json").unlink()
    if recorded is not None:
        (checkpoint.path / "version.json").write_text(json.dumps(recorded))
    (checkpoint.path / "files.json").unlink()
    (checkpoint.path / "files.json").write_text(json.dumps(list_files(checkpoint.path)))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify()
    assert caught.value.cause == (
        f"the checkpoint {checkpoint.path} was written by skyrl-engine {series}, and this is {__version__}, which does not read it"
    )
    assert f'pip install "skyrl-engine{remedy}"' in caught.value.remedy


def test_a_checkpoint_of_a_patch_release_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    monkeypatch.setattr("skyrl_engine.run.checkpoint.__version__", f"{__version__.rpartition('.')[0]}.99")
    store.at(1).verify()
