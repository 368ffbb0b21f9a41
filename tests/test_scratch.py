"""Temporary folders are deleted by their own process, or after its death by another one, and by nobody before."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from skyrl_engine.scratch import KEPT_SECONDS, ScratchFolder, scratch_folder

CHILD = """
import sys
from skyrl_engine.scratch import ScratchFolder
folder = ScratchFolder("weights")
(folder.path / "file").write_text("much")
if sys.argv[1] == "keep":
    folder.keep()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_folder_goes_with_its_process_and_not_before(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    theirs = Path(child.stdout.readline().strip())
    foreign = tmp_path / "skyrl-engine-judge-0"
    foreign.mkdir()
    with scratch_folder("chat") as ours:
        assert theirs.is_dir(), "its process lives"
        child.kill()
        child.communicate()
        with scratch_folder("chat"):
            assert not theirs.parent.exists()
            assert ours.is_dir()
    assert list(tmp_path.iterdir()) == [foreign]


def test_what_a_person_was_told_to_read_stays_for_a_week(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", CHILD, ""], input="", capture_output=True, text=True, check=True)
    assert not Path(ended.stdout.strip()).parent.exists(), "the end of a process deletes what it did not close"
    kept = Path(
        subprocess.run([sys.executable, "-c", CHILD, "keep"], input="", capture_output=True, text=True, check=True).stdout.strip()
    )
    ScratchFolder("chat").close()
    assert (kept / "file").exists()
    long_ago = (kept.parent / ".kept").stat().st_mtime - KEPT_SECONDS - 1
    os.utime(kept.parent / ".kept", (long_ago, long_ago))
    ScratchFolder("chat").close()
    assert list(tmp_path.iterdir()) == []
