"""Folders of checkpoints that were cut off, damaged, or written by other versions: what is whole is readable, the rest in nobody's way."""

import json
import logging
import subprocess
import sys
import time

import attrs
import pytest

from skyrl_engine_tinker import checkpoints, server
from skyrl_engine_tinker.checkpoints import FACTS, Address, Facts, UnreadableCheckpointError, write_checkpoint
from skyrl_engine_tinker.errors import RequestError

ADDRESS = Address(f"{'0' * 32}:train:0", "weights", "one")
OTHER = attrs.evolve(ADDRESS, name="two")
FACTS_OF_ONE = {"base_model": "tiny", "lora_rank": 2, "step": 1, "time": 1.0}


def write(directory, address=ADDRESS, step=1):
    with write_checkpoint(directory, address, Facts("tiny", 2, step, time.time()), overwrite=True) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(str(step))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({**FACTS_OF_ONE, "sharding": "a newer version's"}).encode(),
        json.dumps({"base_model": "tiny"}).encode(),
        json.dumps({**FACTS_OF_ONE, "base_model": ["tiny"]}).encode(),
        json.dumps({**FACTS_OF_ONE, "lora_rank": "2"}).encode(),
        json.dumps({**FACTS_OF_ONE, "time": float("nan")}).encode(),
        json.dumps({**FACTS_OF_ONE, "time": 1e300}).encode(),
        json.dumps({**FACTS_OF_ONE, "expires_at": "never"}).encode(),
        json.dumps({**FACTS_OF_ONE, "expires_at": float("inf")}).encode(),
        json.dumps({**FACTS_OF_ONE, "user_metadata": {"a": 1}}).encode(),
        json.dumps({**FACTS_OF_ONE, "user_metadata": "text"}).encode(),
    ],
)
def test_an_unreadable_checkpoint_is_passed_over_and_logged_once(tmp_path, caplog, content):
    for address in (ADDRESS, OTHER):
        write(tmp_path, address)
    damaged = ADDRESS.folder(tmp_path) / FACTS
    damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [each["tinker_path"] for each in checkpoints.list_checkpoints(tmp_path)] == [OTHER.path]
            assert [run["last_checkpoint"]["tinker_path"] for run in checkpoints.runs(tmp_path)] == [OTHER.path]
            checkpoints.sweep(tmp_path)
    assert [str(damaged) in record.getMessage() for record in caplog.records] == [True]
    # nobody deletes what a newer version of the server may read
    assert damaged.read_bytes() == content
    with pytest.raises(UnreadableCheckpointError, match=f"{ADDRESS.path}' cannot be read"):
        Facts.of(tmp_path, ADDRESS)
    # whoever names it may delete it
    checkpoints.delete(tmp_path, ADDRESS)
    assert not damaged.parent.exists()


@pytest.mark.parametrize("other_client", [{"session_seconds": 0.5}], indirect=True, ids=[""])
def test_a_server_goes_on_beside_an_unreadable_checkpoint(other_client, settings, monkeypatch):
    """It lists the others, and ends sessions that fall silent after the sweep that met it."""
    swept, real = [], checkpoints.sweep
    monkeypatch.setattr(server, "EXPIRY_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "sweep", lambda directory: swept.append(1) or real(directory))
    address = Address(f"{'e' * 32}:train:0", "weights", "newer")
    folder = address.folder(settings.directory)
    folder.mkdir(parents=True)
    (folder / FACTS).write_text(json.dumps({**FACTS_OF_ONE, "layout": 2}))
    status, listed = other_client.post("checkpoints?limit=1000", None, method="GET")
    assert status == 200
    assert address.path not in [each["tinker_path"] for each in listed["checkpoints"]]
    assert other_client.post("training_runs", None, method="GET")[0] == 200
    status, refused = other_client.post("weights_info", {"tinker_path": address.path})
    assert status == 422
    assert "it has the unknown field 'layout', perhaps of a newer version" in refused["detail"]
    deadline = time.monotonic() + 60
    while not swept and time.monotonic() < deadline:
        time.sleep(0.05)
    session = other_client.post("create_session", {})[1]["session_id"]
    while other_client.post(f"sessions/{session}", None, method="GET")[0] == 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert other_client.post(f"sessions/{session}", None, method="GET")[0] == 404
    checkpoints.delete(settings.directory, address)


@pytest.mark.parametrize("other_client", [{"session_seconds": 0.5}], indirect=True, ids=[""])
def test_a_sweep_that_fails_is_not_the_last_one(other_client, monkeypatch):
    """Whatever it was: here the folder's disk."""
    failed = []

    def fail(_directory):
        failed.append(1)
        raise OSError("the disk is gone")

    monkeypatch.setattr(server, "EXPIRY_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "sweep", fail)
    deadline = time.monotonic() + 60
    while not failed and time.monotonic() < deadline:
        time.sleep(0.05)
    session = other_client.post("create_session", {})[1]["session_id"]
    while other_client.post(f"sessions/{session}", None, method="GET")[0] == 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert other_client.post(f"sessions/{session}", None, method="GET")[0] == 404


CRASHING = """
import os, shutil, sys
from pathlib import Path
from skyrl_engine_tinker.checkpoints import Address, Facts, write_checkpoint

left = int(sys.argv[2])

def crash_at(owner, name):
    real = getattr(owner, name)
    def call(*arguments, **options):
        global left
        if left == 0:
            os._exit(9)
        left -= 1
        return real(*arguments, **options)
    setattr(owner, name, call)

for owner, name in ((os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")):
    crash_at(owner, name)
with write_checkpoint(Path(sys.argv[1]), Address("0" * 32 + ":train:0", "weights", "one"), Facts("tiny", 2, 2, 2.0), overwrite=True) as folder:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("2")
"""


def test_a_crash_while_a_checkpoint_is_written_over_leaves_the_old_one_or_the_new_one(tmp_path):
    """A process that ends before each of its steps on the disk in turn, until it gets through."""
    seen, crash = [], 0
    while True:
        directory = tmp_path / str(crash)
        write(directory)
        ended = subprocess.run([sys.executable, "-c", CRASHING, str(directory), str(crash)], check=False, timeout=120)
        assert ended.returncode in (0, 9)
        set_aside = not ADDRESS.folder(directory).exists()
        checkpoints.restore(directory)
        step = Facts.of(directory, ADDRESS).step
        assert (ADDRESS.folder(directory) / "model" / "weights").read_text() == str(step)
        assert [each["tinker_path"] for each in checkpoints.list_checkpoints(directory)] == [ADDRESS.path]
        seen.append((step, set_aside))
        # the next one is written as if nothing had been
        write(directory, step=3)
        assert Facts.of(directory, ADDRESS).step == 3
        assert [each.name for each in ADDRESS.folder(directory).parent.iterdir()] == ["one"]
        if ended.returncode == 0:
            break
        crash += 1
    steps = [step for step, _ in seen]
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
    assert (1, True) in seen, "in one of them the name was free"


def test_a_server_that_starts_while_another_writes_over_a_checkpoint_is_in_nobodys_way(tmp_path, monkeypatch):
    """It brings the old one back between the two renames; the new one takes its place all the same."""
    write(tmp_path)
    real, restored = type(tmp_path).rename, []

    def rename(path, target):
        if str(path).endswith(checkpoints.PARTIAL) and path.is_dir() and not restored:
            restored.append(1)
            checkpoints.restore(tmp_path)
            assert Facts.of(tmp_path, ADDRESS).step == 1
        return real(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    write(tmp_path, step=2)
    assert restored
    assert Facts.of(tmp_path, ADDRESS).step == 2
    assert [each.name for each in ADDRESS.folder(tmp_path).parent.iterdir()] == ["one"]


def test_a_server_brings_back_what_was_set_aside_when_it_starts(settings, serving_of):
    address = Address(f"{'d' * 32}:train:0", "weights", "one")
    write(settings.directory, address)
    folder = address.folder(settings.directory)
    folder.rename(folder.with_name(f"one{checkpoints.REPLACED}"))
    with serving_of(settings) as client:
        listed = client.post("checkpoints?limit=1000", None, method="GET")[1]["checkpoints"]
        assert address.path in [each["tinker_path"] for each in listed]
    checkpoints.delete(settings.directory, address)


def test_what_was_set_aside_is_there_for_whoever_would_write_its_name(tmp_path):
    """Also while the server runs: without `overwrite` it is in the way, as it was before another server's crash."""
    write(tmp_path)
    folder = ADDRESS.folder(tmp_path)
    folder.rename(folder.with_name(f"one{checkpoints.REPLACED}"))
    with (
        pytest.raises(RequestError, match="there is a checkpoint 'one' already"),
        write_checkpoint(tmp_path, ADDRESS, Facts("tiny", 2, 2, 2.0), overwrite=False),
    ):
        pass
    assert Facts.of(tmp_path, ADDRESS).step == 1


def test_no_client_can_name_what_was_set_aside():
    with pytest.raises(RequestError, match="no name of a checkpoint"):
        attrs.evolve(ADDRESS, name=f"one{checkpoints.REPLACED}")
