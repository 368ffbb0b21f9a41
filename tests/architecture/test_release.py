"""The release program edits what belongs together, and refuses a release that would break what strangers have written."""

import subprocess
from pathlib import Path

import pytest
import release
from packaging.requirements import Requirement
from packaging.version import Version
from public_api import FILE, list_breaking, read_public_api

from skyrl_engine.errors import UnsupportedError

ROOT = Path(__file__).parents[2]
PROTOCOL = """
from typing import Protocol
from attrs import frozen

__all__ = ["Loss", "Settings"]

class Loss(Protocol):
    needs: tuple[str, ...]
    def __call__(self, tokens: object) -> object: ...

@frozen
class Settings:
    rate: float
    steps: int = 1
"""
PYPROJECT = '[project]\nname = "{name}"\nversion = "0.3.0"\ndependencies = [{dependencies}]\n'


def git(root: Path, *arguments: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An engine and three distributions beside it, the last of which needs no engine; 0.3.0 is released."""
    files = {
        "pyproject.toml": '[project]\nname = "skyrl-engine"\ndynamic = ["version"]\n',
        "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n- A new word.\n\n## 0.3.0\n\n- Older.\n",
        "skyrl_engine/__init__.py": '__version__ = "0.3.0"\n__all__ = []\n',
        "skyrl_engine/contracts/__init__.py": PROTOCOL,
        **{f"skyrl_engine/hooks/{name}.py": "" for name in ("__init__", "decorators", "markers", "spec")},
        "docs/page.md": 'dependencies = ["skyrl-engine>=0.3,<0.4"]\n',
    }
    for name, dependencies in (("a", '"skyrl-engine>=0.3,<0.4", "httpx>=0.28"'), ("b", '"skyrl-engine>=0.3,<0.4"'), ("c", "")):
        files[f"plugins/{name}/pyproject.toml"] = PYPROJECT.format(name=f"skyrl-engine-{name}", dependencies=dependencies)
        files[f"plugins/{name}/CHANGELOG.md"] = "# Changelog\n\n## 0.3.0\n\n- For skyrl-engine 0.3.\n"
    for place, text in files.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text(read_public_api(tmp_path))
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    git(tmp_path, "tag", "v0.3.0")
    return tmp_path


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "as it is")


def change_contract(root: Path, old: str, new: str) -> None:
    file = root / "skyrl_engine/contracts/__init__.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    (root / FILE).write_text(read_public_api(root))
    commit(root)


def refusal(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the program says against a release; it changed nothing."""
    before = release.git(root, "status", "--porcelain")
    assert release.main(arguments, root) == 2
    assert release.git(root, "status", "--porcelain") == before
    return capsys.readouterr().err


def test_a_patch_version_moves_versions_changelogs_and_ranges_of_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["0.3.1"], root) == 0
    assert {str(project.version) for project in release.read_projects(root).values()} == {"0.3.1"}
    assert '"skyrl-engine>=0.3.1,<0.4", "httpx>=0.28"' in (root / "plugins/a/pyproject.toml").read_text()
    assert (root / "CHANGELOG.md").read_text() == "# Changelog\n\n## 0.3.1\n\n- A new word.\n\n## 0.3.0\n\n- Older.\n"
    section = "# Changelog\n\n## 0.3.1\n\n- For skyrl-engine 0.3.1.\n\n## 0.3.0\n\n- For skyrl-engine 0.3.\n"
    assert (root / "plugins/a/CHANGELOG.md").read_text() == section
    assert "## 0.3.1\n\n## 0.3.0" in (root / "plugins/c/CHANGELOG.md").read_text()
    assert "skyrl-engine>=0.3,<0.4" in (root / "docs/page.md").read_text()
    said = capsys.readouterr().out
    assert "skyrl-engine 0.3.0 -> 0.3.1" in said
    assert "git tag v0.3.1" in said


def test_one_plugin_is_released_alone_for_the_engine_beside_it(root: Path) -> None:
    changelog = root / "plugins/b/CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## 0.3.0", "## Unreleased\n\n- Faster.\n\n## 0.3.0"))
    commit(root)
    assert release.main(["0.3.4", "skyrl-engine-b"], root) == 0
    versions = {name: str(project.version) for name, project in release.read_projects(root).items()}
    assert versions == {"skyrl-engine": "0.3.0", "skyrl-engine-a": "0.3.0", "skyrl-engine-b": "0.3.4", "skyrl-engine-c": "0.3.0"}
    assert '"skyrl-engine>=0.3,<0.4"' in (root / "plugins/b/pyproject.toml").read_text()
    assert changelog.read_text().startswith("# Changelog\n\n## 0.3.4\n\n- For skyrl-engine 0.3.\n- Faster.\n\n## 0.3.0")


def test_a_plugin_is_not_released_alone_beside_an_engine_that_nobody_has(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_contract(root, "    steps: int = 1", "    steps: int = 1\n    turns: int = 0")
    said = refusal(root, capsys, "0.3.1", "skyrl-engine-b")
    assert "is not what was released as 0.3.0, with which the range would begin. Release the engine too" in said
    assert release.main(["0.3.1", "skyrl-engine-c"], root) == 0


def test_a_minor_version_may_change_the_contract_and_takes_every_plugin_along(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_contract(root, "steps: int = 1", "turns: int = 1")
    assert "would refuse skyrl-engine-b" in refusal(root, capsys, "0.4.0", "skyrl-engine", "skyrl-engine-a")
    assert release.main(["0.4.0"], root) == 0
    assert '"skyrl-engine>=0.4,<0.5"' in (root / "plugins/b/pyproject.toml").read_text()
    assert "skyrl-engine>=0.4,<0.5" in (root / "docs/page.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("0.3.0",), "0.3.0 is not newer than skyrl-engine 0.3.0, skyrl-engine-a 0.3.0"),
        (("0.2.9", "skyrl-engine-a"), "0.2.9 is not newer than skyrl-engine-a 0.3.0. Choose a newer version"),
        (("0.3",), "'0.3' is not a version of three numbers"),
        (("0.4.0rc1",), "'0.4.0rc1' is not a version of three numbers"),
        (("0.3.1", "skyrl-engine-z"), "there is no distribution skyrl-engine-z here. Choose from skyrl-engine, "),
        ((), "usage"),
        (("--help",), "usage"),
    ],
)
def test_a_version_that_cannot_be_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert words in refusal(root, capsys, *arguments)


def test_what_is_not_committed_or_not_written_down_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "new.py").write_text("")
    assert "files are not as committed: new.py. Commit or stash them" in refusal(root, capsys, "0.3.1")
    file = root / "skyrl_engine/contracts/__init__.py"
    file.write_text(file.read_text().replace("rate: float", "speed: float"))
    commit(root)
    assert "public-api.txt is not what the sources say" in refusal(root, capsys, "0.3.1")
    file.write_text(PROTOCOL)
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## 0.3.0\n\n- Older.\n")
    commit(root)
    assert "CHANGELOG.md says nothing about this release" in refusal(root, capsys, "0.3.1")
    git(root, "tag", "--delete", "v0.3.0")
    assert "there is no tag v0.3.0 with docs/reference/public-api.txt. Fetch it" in refusal(root, capsys, "0.3.1")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "tokens: object",
            "tokens: object, weights: object",
            "contracts.Loss: `def __call__(tokens: object) -> object` is gone or changed",
        ),
        (
            "needs: tuple[str, ...]",
            "needs: tuple[str, ...]\n    asks: int",
            "Loss is a protocol, and plugins do not have its new `asks: int`",
        ),
        ("    steps: int = 1", "    steps: int = 1\n    turns: int", "its constructor asks for the new `turns: int`"),
        ("    rate: float", "    turns: int = 1\n    rate: float", "Settings: its fields have other places than before"),
        (
            "rate: float\n    steps: int = 1",
            "steps: int = 1\n    rate: float",
            "Settings: its fields have other places than before",
        ),
        ("    steps: int = 1", "    steps: int = 2", "Settings: `steps: int = 1` is gone or changed"),
        ('["Loss", "Settings"]', '["Loss"]', "skyrl_engine.contracts.Settings is gone"),
        ("@frozen", "@frozen(eq=False)", "is @frozen(eq=False) class skyrl_engine.contracts.Settings"),
    ],
)
def test_a_patch_version_changes_nothing_public(
    root: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    change_contract(root, old, new)
    said = refusal(root, capsys, "0.3.1")
    assert words in said
    assert "Release a new minor version, 0.4.0" in said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    steps: int = 1", "    steps: int = 1\n    turns: int = 0\n\n    def twice(self) -> int: ..."),
        ('["Loss", "Settings"]', '["Loss", "Settings", "other"]\n\ndef other(word: str) -> str: ...'),
        ("rate: float", 'rate: float\n    """How fast."""'),
    ],
)
def test_a_patch_version_may_add_what_nobody_must_know(root: Path, old: str, new: str) -> None:
    change_contract(root, old, new)
    assert release.main(["0.3.1", "skyrl-engine"], root) == 0


def test_the_file_of_the_public_interface_is_what_the_sources_say() -> None:
    """`python tests/running/public_api.py` writes it; the difference belongs into the commit, where a reviewer sees it."""
    text = read_public_api()
    assert (ROOT / FILE).read_text(encoding="utf-8") == text, "run: python tests/running/public_api.py"
    # names by every way that they come: a facade's list, a hook's module, a method inherited from another file
    for line in (
        "class skyrl_engine.contracts.Collator(Protocol)",
        "    def plan(lengths: SampleLengths, layout: Layout) -> BatchPlan",
        "@hookspec(firstresult=True) def skyrl_engine.hooks.spec.skyrl_engine_make_loss(config: Any, context: FactoryContext) -> Loss",
        "    def generate(requests: Sequence[GenerationRequest]) -> Future[list[Completion]]",
    ):
        assert line in text.splitlines(), line
    assert list_breaking(text, text) == []


def test_every_range_of_the_engine_is_one_that_a_release_moves() -> None:
    projects = release.read_projects(ROOT)
    for project in projects.values():
        lines = [
            line for line in (project.folder / "pyproject.toml").read_text().splitlines() if line.startswith("dependencies = [")
        ]
        wants_engine = any('"skyrl-engine' in line for line in lines)
        assert project.has_range == wants_engine, project.name
    assert sum(project.has_range for project in projects.values()) > 20
    assert Requirement(f"skyrl-engine{release.state_range(Version('1.2.0'))}").specifier == Requirement("x>=1.2,<1.3").specifier


def test_a_plugin_without_a_release_gets_its_first_section() -> None:
    assert (
        release.open_section("# Changelog\n", Version("0.1.0"), Version("0.3.0"))
        == "# Changelog\n\n## 0.1.0\n\n- For skyrl-engine 0.3.\n"
    )


def test_a_project_that_states_no_version_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="0 lines state a version"):
        release.set_version("[project]\n", Version("0.3.1"))
    with pytest.raises(UnsupportedError, match="not a version"):
        release.parse_version("01.2.3")
