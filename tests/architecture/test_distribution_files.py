"""`nox -s dist` sees what does not belong into a file for an index, and what such a file lacks."""

import importlib
import tarfile
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest
import release
from packaging.version import Version

ROOT = Path(__file__).parents[2]
METADATA = "Version: 0.3.0\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n"
PROJECT = release.Project(ROOT, "skyrl-engine-a", Version("0.3.0"), has_range=True)
WHEEL = {
    "skyrl_engine_a/__init__.py": "",
    "skyrl_engine_a/py.typed": "",
    "skyrl_engine_a/templates/tests/test_${name}.py.in": "",
    "skyrl_engine_a-0.3.0.dist-info/METADATA": METADATA,
    "skyrl_engine_a-0.3.0.dist-info/licenses/LICENSE": (ROOT / "LICENSE").read_text(),
}


@pytest.fixture
def dist(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "outsider"))
    return importlib.import_module("dist")


def pack(folder: Path, contents: dict[str, str]) -> Path:
    file = folder / "skyrl_engine_a-0.3.0-py3-none-any.whl"
    with ZipFile(file, "w") as wheel:
        for name, text in contents.items():
            wheel.writestr(name, text)
    return file


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({}, []),
        ({"skyrl_engine_a/tests/check.py": ""}, ["skyrl_engine_a/tests/check.py is a test"]),
        ({"skyrl_engine_a/test_it.py": ""}, ["skyrl_engine_a/test_it.py is a test"]),
        ({"skyrl_engine_a/fast.so": ""}, ["skyrl_engine_a/fast.so was made on this machine"]),
        ({"other/py.typed": ""}, ["it has the packages ['other', 'skyrl_engine_a']"]),
        ({"skyrl_engine_a/py.typed": None}, ["skyrl_engine_a/py.typed is missing"]),
        ({"skyrl_engine_a-0.3.0.dist-info/licenses/LICENSE": None}, ["skyrl_engine_a-0.3.0.dist-info/licenses/LICENSE is missing"]),
        (
            {"skyrl_engine_a-0.3.0.dist-info/licenses/LICENSE": "MIT"},
            ["skyrl_engine_a-0.3.0.dist-info/licenses/LICENSE is another licence"],
        ),
        (
            {"skyrl_engine_a-0.3.0.dist-info/METADATA": METADATA.replace("0.3.0", "0.2.0")},
            ["its metadata have no line 'Version: 0.3.0'"],
        ),
    ],
)
def test_a_wheel_with_a_fault_is_seen(dist: ModuleType, tmp_path: Path, change: dict[str, str | None], problems: list[str]) -> None:
    contents = {name: text for name, text in (WHEEL | change).items() if text is not None}
    assert list(dist.list_problems(pack(tmp_path, contents), PROJECT)) == problems


def test_an_empty_source_distribution_lacks_all_that_it_needs(dist: ModuleType, tmp_path: Path) -> None:
    with tarfile.open(file := tmp_path / "skyrl_engine_a-0.3.0.tar.gz", "w:gz"):
        pass
    missing = [problem for problem in dist.list_problems(file, PROJECT) if problem.endswith("is missing")]
    assert missing == [
        f"skyrl_engine_a-0.3.0/{name} is missing" for name in ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml")
    ]


def test_a_file_that_grew_is_seen(dist: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = pack(tmp_path, WHEEL)
    assert list(dist.list_size_problems(file, "skyrl-engine-a")) == []
    monkeypatch.setattr(dist, "MOST_BYTES_OF_OTHERS", 100)
    assert "bytes are more than 100" in next(dist.list_size_problems(file, "skyrl-engine-a"))
