"""A run's copy in a store is whole or absent, whatever call fails or is the last one, and comes back as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
from failing_store import StoreOfTest

from skyrl_engine.errors import CheckpointError, StoreError
from skyrl_engine.object_store import place as places
from skyrl_engine.object_store.place import StorePlace
from skyrl_engine.object_store.snapshot import Snapshot, look
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.directory import RunDirectory
from skyrl_engine.run.fetch import fetch_into
from skyrl_engine.run.mirror import Mirror

ADDRESS = "failing://bucket/runs/x"


class EndedError(BaseException):
    """The process ends here."""


@pytest.fixture(autouse=True)
def store(monkeypatch) -> None:
    StoreOfTest.begin()
    monkeypatch.setattr(places.time, "sleep", lambda _: None)


def begin(path: Path) -> RunDirectory:
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.manifest.write_text('{"run": 1}')
    run.config.write_text("[run]\n")
    run.rollouts.mkdir()
    (run.rollouts / "segment-00000000.arrow").write_bytes(b"first")
    run.metrics.touch()
    run.log.write_text("log\n")
    return run


def train(run: RunDirectory, step: int, keep: int | None = 2) -> None:
    """Write what a run writes until the checkpoint of a step, this one included."""
    with run.metrics.open("a") as file:
        file.write(json.dumps({"kind": "step", "step": step}) + "\n")
    with (run.rollouts / f"segment-{step:08d}.arrow").open("ab") as file:
        file.write(bytes([step]) * 50)
    documents = {"trainer.json": {"step": step}}
    CheckpointStore(run.checkpoints, keep).save(
        step, lambda folder: (folder / "0.bin").write_bytes(bytes([step]) * 100) and None, documents
    )


def read(run: RunDirectory) -> dict[str, bytes]:
    files = [path for path in run.path.rglob("*") if path.is_file() and path not in (run.store, run.log)]
    return {path.relative_to(run.path).as_posix(): path.read_bytes() for path in files}


def open_mirror(run: RunDirectory, **options: Any) -> Mirror:
    return Mirror.open(ADDRESS, run, **{"resumes": False, "asynchronous": False, **options})


def fetch(path: Path) -> tuple[Snapshot, RunDirectory]:
    path.mkdir(parents=True)
    run = RunDirectory(path)
    return fetch_into(StorePlace.of(ADDRESS), run), run


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_copy_is_the_directory_of_its_checkpoint(tmp_path, asynchronous) -> None:
    run = begin(tmp_path / "a")
    mirror = open_mirror(run, asynchronous=asynchronous)
    for step in range(1, 5):
        train(run, step)
        expected = read(run)
        mirror.copy(step)
        with run.metrics.open("a") as file:
            file.write("later\n")
        (run.rollouts / "segment-00000000.arrow").unlink(missing_ok=True)
        mirror.wait(last=True)
        snapshot, fetched = fetch(tmp_path / f"fetched-{step}")
        assert (snapshot.step, read(fetched)) == (step, expected)
        assert CheckpointStore(fetched.checkpoints).at(None).verify() is None
    held = StorePlace.of(ADDRESS).find()
    assert {name.split("/")[-3] for name in held if name.endswith("0.bin")} == {"step-00000003", "step-00000004"}, (
        "retention is that of the run"
    )
    assert set(held) == {f"{snapshot.number:08d}.json", *(file.key for file in snapshot.files.values())}, "nothing else is left"


def test_what_the_store_holds_is_not_sent_again(tmp_path) -> None:
    run = begin(tmp_path / "a")
    mirror = open_mirror(run)
    train(run, 1)
    mirror.copy(1)
    StoreOfTest.expect()
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"weights")
    mirror.copy(1, with_model=True)
    assert [call for call in StoreOfTest.calls if call in ("put_file", "pipe_file")] == ["pipe_file"] * 2, "the model and the list"
    assert read(fetch(tmp_path / "b")[1])["model/model.safetensors"] == b"weights"


def count_calls(tmp_path: Path) -> int:
    run = begin(tmp_path / "counted")
    mirror = open_mirror(run)
    train(run, 1)
    mirror.copy(1)
    train(run, 2, keep=1)
    StoreOfTest.expect()
    mirror.copy(2)
    number = len(StoreOfTest.calls)
    StoreOfTest.begin()
    return number


@pytest.mark.parametrize("before", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["before the call", "after it"])
def test_a_process_that_ends_at_any_call_leaves_a_whole_copy_and_goes_on_elsewhere(tmp_path, before) -> None:
    """The k-th call is the last one of the process, for every k; half of an object is there where it was being written."""
    for last in range(1, count_calls(tmp_path) + 1):
        StoreOfTest.begin()
        run = begin(tmp_path / f"{last}")
        mirror = open_mirror(run)
        train(run, 1)
        copies = {1: read(run)}
        mirror.copy(1)
        train(run, 2, keep=1)
        copies[2] = read(run)

        def end(number: int, name: str, last: int = last) -> None:
            if number == last + (not before):
                raise EndedError

        StoreOfTest.expect(end)
        try:
            mirror.copy(2)
        except EndedError:
            if before and StoreOfTest.calls[-1] == "pipe_file":
                StoreOfTest.expect()
                halve(mirror)
        StoreOfTest.expect()
        other = RunDirectory(tmp_path / f"{last}-other")
        other.path.mkdir()
        resumed = open_mirror(other, resumes=True)
        step = CheckpointStore(other.checkpoints).at(None).step
        assert read(other) == copies[step]
        train(other, 3, keep=1)
        resumed.copy(3)
        newest = look(StorePlace.of(ADDRESS))
        assert newest.newest is not None
        assert set(newest.sizes) == {f"{newest.newest.number:08d}.json", *(file.key for file in newest.newest.files.values())}
        assert read(fetch(tmp_path / f"{last}-third")[1]) == read(other)


def halve(mirror: Mirror) -> None:
    """Leave half of a list, as a store does that shows objects while they are written."""
    contents = look(mirror.place)
    assert contents.newest is not None
    name = f"{contents.newest.number + 1:08d}.json"
    if name not in contents.sizes:
        (mirror.place.files).pipe_file((mirror.place / name).path, contents.newest.write()[:200])


def test_a_store_that_fails_for_a_while_loses_nothing(tmp_path, caplog) -> None:
    """The run goes on, and the next copy brings everything; the last one of a session raises."""
    run = begin(tmp_path / "a")
    mirror = open_mirror(run)
    for step, failing in ((1, True), (2, False), (3, True)):
        train(run, step)

        def fail(number: int, name: str) -> None:
            if name in ("put_file", "pipe_file"):
                raise ConnectionError("no route to host")

        StoreOfTest.expect(fail if failing else None)
        mirror.copy(step)
        StoreOfTest.expect()
        newest = look(mirror.place).newest
        assert (newest and newest.step) == {1: None, 2: 2, 3: 2}[step]
    assert caplog.text.count("The next checkpoint is copied with all that is missing") == 2
    StoreOfTest.expect(fail)
    with pytest.raises(StoreError, match=r"the store cannot write failing://bucket/runs/x/.* after 4 tries: ConnectionError"):
        mirror.copy(3, with_model=True)
    with pytest.raises(StoreError, match="cannot write"):
        open_mirror(run, resumes=True)


def test_a_damaged_object_is_never_taken_for_whole(tmp_path) -> None:
    run = begin(tmp_path / "a")
    mirror = open_mirror(run)
    train(run, 1)
    mirror.copy(1)
    name = next(name for name in mirror.place.find() if name.endswith("0.bin"))
    mirror.place.files.pipe_file((mirror.place / name).path, b"\0" * 100)
    with pytest.raises(StoreError, match=r"0.bin after 4 tries: OSError: its content differs"):
        fetch(tmp_path / "b")
    assert not (tmp_path / "b" / "checkpoints").exists()
    mirror.place.files.rm_file((mirror.place / name).path)
    with pytest.raises(CheckpointError, match="has a list of files, and not all of them"):
        fetch(tmp_path / "c")


def test_a_fetch_that_is_interrupted_is_begun_again(tmp_path) -> None:
    run = begin(tmp_path / "a")
    mirror = open_mirror(run)
    train(run, 1)
    mirror.copy(1)
    other = RunDirectory(tmp_path / "b")
    other.path.mkdir()

    def end(number: int, name: str) -> None:
        if StoreOfTest.calls.count("get_file") == 4:
            raise EndedError

    StoreOfTest.expect(end)
    with pytest.raises(EndedError):
        open_mirror(other, resumes=True)
    assert CheckpointStore(other.checkpoints).latest() is None
    StoreOfTest.expect()
    open_mirror(other, resumes=True)
    assert read(other) == read(run)


def test_a_place_that_holds_something_else_is_refused(tmp_path) -> None:
    run = begin(tmp_path / "a")
    mirror = open_mirror(run)
    train(run, 1)
    mirror.copy(1)
    with pytest.raises(CheckpointError, match=r"already holds a run. Name a new place"):
        open_mirror(run)
    stranger = begin(tmp_path / "b")
    train(stranger, 1)
    with pytest.raises(CheckpointError, match="holds another run"):
        open_mirror(stranger, resumes=True)
    other = RunDirectory(tmp_path / "c")
    other.path.mkdir()
    elsewhere = open_mirror(other, resumes=True)
    train(other, 2)
    elsewhere.copy(2)
    train(run, 2)
    with pytest.raises(
        CheckpointError, match=r"after step 2 that another process than that of .* wrote. Resume in an empty run.directory"
    ):
        mirror.copy(2)
    with pytest.raises(CheckpointError, match="that another process"):
        open_mirror(run, resumes=True)
    StorePlace.of(ADDRESS).files.pipe_file("/bucket/mine/notes.txt", b"x")
    with pytest.raises(CheckpointError, match=r"holds files that belong to no run, such as 'notes.txt'"):
        Mirror.open("failing://bucket/mine", run, resumes=False, asynchronous=False)


def test_a_folder_of_this_machine_is_a_store_too(tmp_path) -> None:
    """Such as a mounted one; it need not be there yet."""
    run, address = begin(tmp_path / "run"), (tmp_path / "mounted" / "runs" / "x").as_uri()
    mirror = Mirror.open(address, run, resumes=False, asynchronous=False)
    train(run, 1)
    mirror.copy(1)
    back = RunDirectory(tmp_path / "back")
    back.path.mkdir()
    fetch_into(StorePlace.of(address), back)
    assert read(back) == read(run)
