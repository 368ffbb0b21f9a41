"""The user's key: made once, read by its owner alone, wherever the environment says."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyrl_engine.config.trust.user_key import VARIABLE, key_file, make_key, read_key
from skyrl_engine.errors import EngineError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "state" / "run-key"
    monkeypatch.setenv(VARIABLE, str(place))
    return place


def test_it_is_made_once_and_for_its_owner_alone(place: Path) -> None:
    assert read_key() is None
    previous = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as threads:
            keys = set(threads.map(lambda _: make_key(), range(32)))
    finally:
        os.umask(previous)
    assert keys == {read_key()}
    assert len(keys.pop()) >= 32
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert [file.name for file in place.parent.iterdir()] == ["run-key"], "nothing that was written aside stays"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_one_that_others_may_use_is_refused(place: Path, mode: int) -> None:
    make_key()
    place.chmod(mode)
    for use in (read_key, make_key):
        with pytest.raises(EngineError, match=f"may be read or written by others .mode {mode:04o}") as caught:
            use()
        assert VARIABLE in caught.value.remedy


def test_one_of_another_user_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_key()
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(EngineError, match="is another user's"):
        read_key()


def test_what_is_no_key_is_refused(place: Path) -> None:
    place.parent.mkdir()
    place.touch(0o600)
    with pytest.raises(EngineError, match="fewer than 32 bytes"):
        make_key()
    place.unlink()
    place.mkdir()
    with pytest.raises(EngineError, match=r"no file|cannot be read"):
        make_key()


def test_without_the_variable_it_lies_in_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("platformdirs.user_state_path", lambda name: tmp_path / name)
    assert key_file() == tmp_path / "skyrl-engine" / "run-key"
