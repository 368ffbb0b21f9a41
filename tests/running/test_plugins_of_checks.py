"""What checks are run with: tests of tests that rest while their sources do, and seconds by file."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import seconds_per_file

HERE = Path(__file__).parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A source, and a test of its test."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = of_sources(*places): as here\n")
    (tmp_path / "source.py").write_text("RIGHT = True\n")
    test = "import pytest\nfrom source import RIGHT\n@pytest.mark.of_sources('source.py')\ndef test_it():\n    assert RIGHT\n"
    (tmp_path / "test_it.py").write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{test}")
    return tmp_path


def counted(project: Path, *arguments: str, **environment: str) -> str:
    """The last line of a pytest run there."""
    own = {"PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "CHECK_SECONDS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "unchanged_sources", "-p", "seconds_per_file", *arguments]
    done = subprocess.run(
        command, cwd=project, env={**os.environ, **own, **environment}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip().splitlines()[-1]


def test_a_test_rests_until_its_sources_change_or_it_is_asked_for(project: Path) -> None:
    assert counted(project).startswith("1 passed")
    assert counted(project).startswith("1 deselected")
    assert counted(project, "--every-source").startswith("1 passed")
    (project / "source.py").write_text("RIGHT = False\n")
    assert counted(project).startswith("1 failed")
    assert counted(project).startswith("1 failed"), "what failed does not rest"
    (project / "source.py").write_text("RIGHT = True\n")
    assert counted(project).startswith("1 deselected"), "with these sources it has passed"
    (project / "source.py").write_text("RIGHT = 1\n")
    assert counted(project).startswith("1 passed")


def test_a_fresh_clone_rests_where_the_night_passed(project: Path) -> None:
    (project / "source.py").write_text("RIGHT = 2\n")
    assert counted(project).startswith("1 passed")
    kept = project / ".cache"
    (record,) = (kept / "unchanged-sources").iterdir()
    listed = project / "tests" / "running" / "passed.txt"
    listed.parent.mkdir(parents=True)
    listed.write_text(f"{'0' * 20}-{'0' * 20}\n{record.name}\n")
    shutil.rmtree(kept)
    assert counted(project).startswith("1 deselected")
    assert counted(project, "--every-source").startswith("1 passed")
    shutil.rmtree(kept)
    (project / "source.py").write_text("RIGHT = 3\n")
    assert counted(project).startswith("1 passed"), "with other sources the list says nothing"


def test_seconds_are_of_a_test_and_what_it_starts(project: Path) -> None:
    work = "import subprocess, sys\nBUSY = 'while __import__(\"time\").process_time() < 0.5: pass'\n"
    (project / "test_busy.py").write_text(f"{work}def test_busy():\n    subprocess.run([sys.executable, '-c', BUSY])\n")
    counted(project, CHECK_SECONDS=str(project / "seconds"))
    rows = {row["file"]: row for row in map(json.loads, (project / "seconds").read_text().splitlines())}
    assert rows["test_busy.py"]["cpu"] >= 0.4
    assert rows["test_it.py"]["cpu"] < 0.3
    table = seconds_per_file.table(list(rows.values()))
    assert table.index("`test_busy.py`") < table.index("`test_it.py`")
