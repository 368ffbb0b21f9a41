"""A run whose copies are in an object store goes on elsewhere, bit for bit, after its machine is lost."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_store import StoreOfTest
from safetensors.numpy import load_file

from skyrl_engine.cli.app import main
from skyrl_engine.config import ResolvedConfig
from skyrl_engine.errors import CheckpointError, ConfigError, StoreError
from skyrl_engine.object_store import place as places
from skyrl_engine.object_store.place import StorePlace
from skyrl_engine.object_store.snapshot import look
from skyrl_engine.run.checkpoint import CheckpointStore
from skyrl_engine.run.metrics import read_metrics
from skyrl_engine.training.sft.trainer import SftTrainer, run_sft

Configure = Callable[..., ResolvedConfig]
ADDRESS = "failing://bucket/x"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    StoreOfTest.begin()
    monkeypatch.setattr(places.time, "sleep", lambda _: None)


def facts(directory: Path) -> tuple[list[float], dict[str, bytes], dict[str, bytes]]:
    """Losses by step, the states of the last checkpoint, and the weights of the model."""
    losses = [record["metrics"]["loss"] for record in read_metrics(directory / "metrics.jsonl") if record["kind"] == "step"]
    latest = CheckpointStore(directory / "checkpoints").at(None)
    latest.verify()
    states = {path.name: path.read_bytes() for path in latest.state.iterdir()}
    return losses, states, {name: array.tobytes() for name, array in load_file(directory / "model" / "model.safetensors").items()}


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_run_goes_on_in_an_empty_folder_from_the_copy_of_a_lost_machine(
    configure: Configure, store: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asynchronous: bool
) -> None:
    """The machine fails at step 6, after the checkpoints of steps 3 and 5; of its folder nothing is left. The store fails now and then."""
    whole = run_sft(configure("whole", training={"steps": 7}, checkpoint={"every": 5})).directory
    settings = {"training": {"steps": 7}, "checkpoint": {"every": 5, "store": ADDRESS, "asynchronous": asynchronous}}
    step = SftTrainer.step

    def fail_at_six(self: SftTrainer, number: int) -> Any:
        if number == 7:
            raise MemoryError("the machine is gone")
        return step(self, number)

    def fail(number: int, name: str) -> None:
        if number % 3 == 0:
            raise ConnectionResetError("reset by peer")

    StoreOfTest.expect(fail)
    with monkeypatch.context() as lost:
        lost.setattr(SftTrainer, "step", fail_at_six)
        with pytest.raises(MemoryError):
            run_sft(configure("lost", **settings))
    shutil.rmtree(tmp_path / "lost")
    newest = look(StorePlace.of(ADDRESS)).newest
    assert newest is not None
    assert newest.step == 5
    there = run_sft(configure("there", **settings), resume=True).directory
    assert facts(there) == facts(whole)
    StoreOfTest.expect()
    assert main(["runs", "fetch", ADDRESS, str(tmp_path / "fetched")]) == 0
    assert facts(tmp_path / "fetched") == facts(whole), "the end of the run is in the store, its model too"
    with pytest.raises(CheckpointError, match="already holds a run"):
        run_sft(configure("again", **settings))
    assert not (tmp_path / "again").exists()


def test_a_store_that_cannot_be_used_is_refused_before_training(configure: Configure, store: None, tmp_path: Path) -> None:
    def fail(number: int, name: str) -> None:
        raise ConnectionError("no route to host")

    StoreOfTest.expect(fail)
    with pytest.raises(StoreError, match=r"cannot list failing://bucket/x after 4 tries: ConnectionError: no route"):
        run_sft(configure("run", checkpoint={"store": ADDRESS}))
    assert not (tmp_path / "run").exists()
    for address, message in (
        ("bucket/x", "no address of an object store. Begin it with a protocol"),
        ("s3://k:geheim@b/x", "holds a secret"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            configure("run", checkpoint={"store": address})
        assert "geheim" not in str(caught.value)


# --- a server that speaks S3 ---------------------------------------------------------------------------------------------------------

SERVED = all(importlib.util.find_spec(name) for name in ("moto", "s3fs"))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket of moto's server; credentials and the address of the server are in the environment alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url, timeout=5).close()
                break
            assert time.monotonic() < until, "moto's server does not answer"
            time.sleep(0.2)
        secrets = {"AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": "geheim-geheim"}
        for name, value in {**secrets, "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}.items():
            monkeypatch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("s3://bucket")
        yield "s3://bucket"
        s3fs.S3FileSystem.clear_instance_cache()
    finally:
        server.kill()
        server.wait()


RUN = """
import os, signal, sys, tomllib
import s3fs
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.training.sft.trainer import run_sft
last = int(sys.argv[2])
put, count = s3fs.S3FileSystem._call_s3, 0
async def call(self, method, *arguments, **options):
    global count
    if method in ("put_object", "upload_part"):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
    return await put(self, method, *arguments, **options)
s3fs.S3FileSystem._call_s3 = call
run_sft(resolve(from_dict(tomllib.load(open(sys.argv[1], "rb")), "test")), resume=True)
"""


@pytest.mark.nightly
@pytest.mark.skipif(not SERVED, reason="NOT TESTED HERE: needs moto's S3 server and s3fs; `nox -s objectstore` has them")
def test_runs_that_are_killed_amid_an_upload_to_s3_go_on_elsewhere(
    configure: Configure, material: Path, bucket: str, tmp_path: Path
) -> None:
    """Rows are read from S3 as well. Every machine is killed at a later write than the one before, until one reaches the end."""
    import s3fs

    s3fs.S3FileSystem().put_file(str(material / "train.jsonl"), "bucket/train.jsonl")
    changed = {"data": {"train": f"{bucket}/train.jsonl"}, "training": {"steps": 7}, "checkpoint": {"every": 2}}
    whole = run_sft(configure("whole", **changed)).directory
    program = tmp_path / "run.py"
    program.write_text(textwrap.dedent(RUN))
    stored = {**changed, "checkpoint": {"every": 2, "store": f"{bucket}/runs/x"}}
    steps = list[int | None]()
    for number, last in enumerate((8, 20, 29, 15, 10_000)):
        config = tmp_path / f"{number}.toml"
        config.write_text(configure(f"machine-{number}", **stored).to_toml())
        ended = subprocess.run([sys.executable, str(program), str(config), str(last)], capture_output=True, text=True, check=False)
        assert ended.returncode == (0 if last == 10_000 else -signal.SIGKILL), ended.stderr[-3000:]
        newest = look(StorePlace.of(f"{bucket}/runs/x")).newest
        steps.append(newest and newest.step)
        if last != 10_000:
            shutil.rmtree(tmp_path / f"machine-{number}")
    assert steps[-1] == 7
    assert len({*steps}) > 2, steps
    assert facts(tmp_path / "machine-4") == facts(whole)
    held = StorePlace.of(f"{bucket}/runs/x").find()
    newest = look(StorePlace.of(f"{bucket}/runs/x")).newest
    assert newest is not None
    assert set(held) == {f"{newest.number:08d}.json", *(file.key for file in newest.files.values())}
    written = [path.read_bytes() for path in (tmp_path / "machine-4").rglob("*") if path.is_file()]
    assert not any(os.environ["AWS_SECRET_ACCESS_KEY"].encode() in content for content in written)
