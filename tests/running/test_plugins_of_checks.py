"""Plugins of the checks: tests of tests that rest while their sources do, and seconds by file."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import costly_tests
import pytest
import seconds_per_file
import unchanged_sources

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MARKED = sorted(
    path
    for folder in ("tests", "plugins")
    for path in (ROOT / folder).rglob("test_*.py")
    if "mark.of_sources(" in path.read_text() and path.parent != HERE
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A source, and a test of its test."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = of_sources(*places): as here\n")
    (tmp_path / "source.py").write_text("RIGHT = True\n")
    test = "import pytest\nfrom source import RIGHT\n@pytest.mark.of_sources('source.py')\ndef test_it():\n    assert RIGHT\n"
    (tmp_path / "test_it.py").write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{test}")
    return tmp_path


def count_tests(project: Path, *arguments: str, **environment: str) -> str:
    """The last line of a pytest run there."""
    own = {"PYTHONPATH": str(HERE), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", "CHECK_SECONDS": ""}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "costly_tests",
        "-p",
        "unchanged_sources",
        "-p",
        "seconds_per_file",
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=project, env={**os.environ, **own, **environment}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip().splitlines()[-1]


def test_a_test_rests_until_its_sources_change_or_it_is_asked_for(project: Path) -> None:
    assert count_tests(project).startswith("1 passed")
    assert count_tests(project).startswith("1 deselected")
    assert count_tests(project, "--every-source").startswith("1 passed")
    (project / "source.py").write_text("RIGHT = False\n")
    assert count_tests(project).startswith("1 failed")
    assert count_tests(project).startswith("1 failed"), "what failed does not rest"
    (project / "source.py").write_text("RIGHT = True\n")
    assert count_tests(project).startswith("1 deselected"), "with these sources it has passed"
    (project / "source.py").write_text("RIGHT = 1\n")
    assert count_tests(project).startswith("1 passed")


def test_a_fresh_clone_rests_where_meta_passed(project: Path) -> None:
    (project / "source.py").write_text("RIGHT = 2\n")
    assert count_tests(project).startswith("1 passed")
    cache = project / ".cache"
    (record,) = (cache / "unchanged-sources").iterdir()
    listed = project / "tests" / "running" / "passed.txt"
    listed.parent.mkdir(parents=True)
    listed.write_text(f"{'0' * 20}-{'0' * 20}\n{record.name}\n")
    shutil.rmtree(cache)
    assert count_tests(project).startswith("1 deselected")
    assert count_tests(project, "--every-source").startswith("1 passed")
    shutil.rmtree(cache)
    (project / "source.py").write_text("RIGHT = 3\n")
    assert count_tests(project).startswith("1 passed"), "with other sources the list says nothing"


def test_what_fails_with_sources_that_it_has_passed_with_rests_no_longer(project: Path) -> None:
    (project / "test_it.py").write_text(
        "import os, pytest\n@pytest.mark.of_sources('source.py')\ndef test_it():\n    assert 'WRONG' not in os.environ\n"
    )
    assert count_tests(project).startswith("1 passed")
    assert count_tests(project, "--every-source", WRONG="1").startswith("1 failed")
    assert count_tests(project).startswith("1 passed"), "it would have rested on what it did before"


def test_the_list_holds_what_meta_passed_and_nothing_from_before(project: Path) -> None:
    assert count_tests(project).startswith("1 passed")
    unchanged_sources.forget(project)
    assert unchanged_sources.write_passed(project) == 0
    assert count_tests(project).startswith("1 passed"), "an empty list lets nothing rest"
    assert unchanged_sources.write_passed(project) == 1
    unchanged_sources.forget(project)
    assert count_tests(project).startswith("1 deselected")


def test_by_day_a_fixed_fifth_of_what_is_due_runs(project: Path) -> None:
    (project / "test_it.py").write_text(
        "import pytest\n@pytest.mark.of_sources('source.py')\n@pytest.mark.parametrize('case', range(11))\ndef test_it(case):\n    pass\n"
    )
    assert count_tests(project, "--by-day").startswith("3 passed, 8 deselected")
    assert count_tests(project, "--by-day").startswith("11 deselected"), "it is the same fifth, which rests now"
    assert count_tests(project).startswith("8 passed, 3 deselected"), "without the option the others are due"


def test_by_day_a_costly_test_has_the_cases_that_the_list_says(project: Path) -> None:
    listed = project / "tests" / "running" / "costly_tests.txt"
    listed.parent.mkdir(parents=True)
    listed.write_text("# why\n2 test_it.py::test_it\n0 test_it.py::test_whole\n")
    (project / "pytest.ini").write_text("[pytest]\nmarkers =\n  costly: as here\n  nightly: as here\n")
    (project / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('case', [pytest.param(0, marks=pytest.mark.nightly), *range(1, 6)])\ndef test_it(case):\n    pass\n"
        "def test_whole():\n    pass\ndef test_cheap():\n    pass\n"
    )
    assert count_tests(project, "--by-day", "-m", "not nightly").startswith("3 passed, 5 deselected")
    assert count_tests(project, "-m", "not nightly").startswith("7 passed, 1 deselected"), "whoever names the file has all"
    assert count_tests(project, "-m", "costly or nightly").startswith("5 passed, 3 deselected"), "and the night has the rest"


def test_what_is_listed_as_costly_is_a_test() -> None:
    for name in costly_tests.read_list(ROOT / costly_tests.LIST):
        file, *_, function = name.split("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), f"{name} is nowhere: take it off the list"


def test_by_day_a_fixed_fifth_of_the_promises_of_a_plugin_runs(project: Path) -> None:
    (project / "test_it.py").write_text(
        "import pytest\n@pytest.mark.conformance\n@pytest.mark.parametrize('case', range(11))\ndef test_it(case):\n    pass\n"
    )
    (project / "pytest.ini").write_text("[pytest]\nmarkers = conformance: as here\n")
    assert count_tests(project, "--by-day").startswith("3 passed, 8 deselected")
    assert count_tests(project, "--by-day").startswith("3 passed, 8 deselected"), "promises do not rest"
    assert count_tests(project).startswith("11 passed")


@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.stem)
def test_a_marked_test_names_all_that_it_imports_from_here(path: Path) -> None:
    """Else a change there would leave it at rest."""
    tree = ast.parse(path.read_text())
    marks = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.of_sources"]
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    imported |= {name for node in froms for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))}
    roots = (path.parent, ROOT, *ROOT.glob("plugins/*/src"))
    needed = {
        found
        for name in imported
        for root in roots
        for found in (root / f"{name.replace('.', '/')}.py", root / name.replace(".", "/") / "__init__.py")
        if found.exists()
    }
    assert marks
    assert needed
    for mark in marks:
        places = [ROOT / ast.literal_eval(place) for place in mark.args]
        forgotten = {file.relative_to(ROOT) for file in needed if not any(file.is_relative_to(place) for place in places)}
        assert not forgotten, f"of_sources of {path.name} leaves out {sorted(map(str, forgotten))}"


def test_seconds_are_of_a_test_and_what_it_starts(project: Path) -> None:
    work = "import subprocess, sys\nBUSY = 'while __import__(\"time\").process_time() < 0.5: pass'\n"
    (project / "test_busy.py").write_text(f"{work}def test_busy():\n    subprocess.run([sys.executable, '-c', BUSY])\n")
    count_tests(project, CHECK_SECONDS=str(project / "seconds"))
    rows = {row["file"]: row for row in map(json.loads, (project / "seconds").read_text().splitlines())}
    assert rows["test_busy.py"]["cpu"] >= 0.4
    assert rows["test_it.py"]["cpu"] < 0.3
    table = seconds_per_file.table(list(rows.values()))
    assert table.index("`test_busy.py`") < table.index("`test_it.py`")
