"""A run directory belongs to one run and to one process at a time."""

import re
from pathlib import Path

import pytest

from skyrl_engine.errors import ConfigError, EngineError
from skyrl_engine.run.directory import open_run_directory, short_name


def test_without_a_configured_directory_every_run_gets_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (open_run_directory(None, name="Org/Tiny Model_v2", resume=False).path for _ in range(2))
    assert first != second
    assert re.fullmatch(r"runs/\d{8}T\d{6}Z-org-tiny-model-v2(-\d+)?", first.as_posix())
    assert second.is_dir()


def test_resuming_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"run\.directory: resuming needs to know which run"):
        open_run_directory(None, name="x", resume=True)


def test_another_run_is_refused_unless_resuming(tmp_path: Path) -> None:
    run = open_run_directory(str(tmp_path / "run"), name="x", resume=False)
    run.manifest.write_text("{}")
    with pytest.raises(ConfigError, match="already holds a run") as caught:
        open_run_directory(str(tmp_path / "run"), name="x", resume=False)
    assert "checkpoint.resume = true" in caught.value.remedy
    assert open_run_directory(str(tmp_path / "run"), name="x", resume=True) == run


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_with_other_files_is_refused(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        open_run_directory(str(tmp_path), name="x", resume=resume)
    with pytest.raises(ConfigError, match="is a file"):
        open_run_directory(str(tmp_path / "thesis.tex"), name="x", resume=resume)


def test_a_run_is_resumed_beside_the_files_of_its_observers(tmp_path: Path) -> None:
    run = open_run_directory(str(tmp_path), name="x", resume=False)
    run.manifest.write_text("{}")
    (tmp_path / "steps.csv").touch()
    assert open_run_directory(str(tmp_path), name="x", resume=True) == run


def test_a_start_that_failed_before_its_manifest_does_not_block_the_directory(tmp_path: Path) -> None:
    run = open_run_directory(str(tmp_path), name="x", resume=False)
    run.log.touch()
    with run.lock():
        pass
    open_run_directory(str(tmp_path), name="x", resume=False)


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"the run directory .*file/run cannot be used \(Not a directory\)"):
        open_run_directory(str(tmp_path / "file" / "run"), name="x", resume=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("nowhere")
    with pytest.raises(EngineError, match=r"the run directory runs cannot be used \(File exists\)"):
        open_run_directory(None, name="x", resume=False)
    run = open_run_directory(str(tmp_path / "run"), name="x", resume=False)
    (run.path / ".lock").mkdir()  # stands for missing permission, which does not keep root from writing
    with pytest.raises(EngineError, match=r"run cannot be used \(Is a directory\)"), run.lock():
        pass


def test_a_second_owner_is_refused(tmp_path: Path) -> None:
    run = open_run_directory(str(tmp_path), name="x", resume=False)
    with run.lock(), pytest.raises(EngineError, match="another process is running in"), run.lock():
        pass
    with run.lock():
        pass


@pytest.mark.parametrize(
    ("text", "name"), [("HuggingFaceTB/SmolLM2", "huggingfacetb-smollm2"), ("///", "run"), ("a" * 60, "a" * 40)]
)
def test_short_names(text: str, name: str) -> None:
    assert short_name(text) == name
