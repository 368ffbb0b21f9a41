"""Requirements and the versions that meet them: what is read, which bounds nobody tested, and which of many releases breaks the tests."""

import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from breaking_releases import find_breaking
from packaging.requirements import Requirement
from requirement_bounds import Named, describe_groups, list_named, list_tools, list_unreached, name_breaking, read_reasons
from resolver import NoVersionsError, Pins, read_pins
from trial_environment import TrialEnvironment, choose_torch

HERE = Path(__file__).parents[2]
RESOLVED = """# a comment
click==8.2.0 ; python_version >= "3.11"
    # via
    #   -r -
    #   typer
numpy==1.26.0
    # via -r -
colorama==0.4.6 ; sys_platform == "nowhere"
    # via click
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An engine and a plugin that requires it."""
    engine = '[project]\nname = "engine"\ndependencies = ["Click>=8.1"]\noptional-dependencies = {train = ["numpy>=1.26,<3"]}\n'
    (tmp_path / "pyproject.toml").write_text(engine)
    (tmp_path / "plugins" / "one").mkdir(parents=True)
    (tmp_path / "plugins" / "one" / "pyproject.toml").write_text('[project]\nname = "plugin-one"\ndependencies = ["engine>=0.3"]\n')
    (tmp_path / "requirements-dev.txt").write_text("# tools\n-e .[train]\nruff>=0.9\nTypes_PyYAML\n")
    return tmp_path


def test_requirements_are_those_on_others_extras_included(repository: Path) -> None:
    assert [str(each) for each in list_named(repository)] == ["Click>=8.1 of engine", "numpy<3,>=1.26 of engine"]
    assert list_tools(repository) == {"ruff", "types-pyyaml"}


def test_every_requirement_of_ours_names_one_lower_bound() -> None:
    """Without one, `nox -s oldest` would install the first release that there ever was."""
    named = list_named(HERE)
    assert len(named) > 40
    assert [str(each) for each in named if each.bound is None] == []


def test_a_resolution_is_read_for_this_python_with_its_reasons() -> None:
    assert read_pins(RESOLVED) == {"click": "8.2.0", "numpy": "1.26.0"}
    assert read_reasons(RESOLVED) == {"click": ["typer"], "numpy": [], "colorama": ["click"]}


def test_hashes_of_a_lock_are_no_part_of_its_versions() -> None:
    assert read_pins("a-b==1.0 ; python_version < '3' \\\n    --hash=sha256:1\nC_D==2.0rc1 \\\n    --hash=sha256:2\n") == {
        "c-d": "2.0rc1"
    }


def test_a_bound_that_another_requirement_raises_is_not_tested(repository: Path) -> None:
    (line,) = list_unreached(list_named(repository), read_pins(RESOLVED), read_reasons(RESOLVED))
    assert line == "Click>=8.1 of engine: 8.2.0 is installed, because of typer"


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ([], "abcdefgh"),
        ([{"c"}], "abcdefgh"),
        ([{"a"}], "a"),
        ([{"a"}, {"h"}], "abcdefgh"),
        ([{"b", "g"}], "abcdefgh"),
        ([{"b", "g"}, {"d"}, {"a", "c", "f"}], "abcdefgh"),
    ],
)
def test_every_group_that_breaks_the_tests_is_named(groups: list[set[str]], names: str) -> None:
    trials = 0

    def breaks(changed: Sequence[str]) -> bool:
        nonlocal trials
        trials += 1
        return any(group <= set(changed) for group in groups)

    found = list(find_breaking(names, breaks))
    assert sorted(map(sorted, found)) == sorted(map(sorted, groups))
    assert trials <= 1 + sum(2 + 4 * len(group) for group in groups), "few: each takes minutes"


def resolve(names: Sequence[str]) -> Pins:
    """Versions in which b takes d with it, and c cannot be changed without a."""
    if "c" in names and "a" not in names:
        raise NoVersionsError
    return {name: "2" if name in names or (name == "d" and "b" in names) else "1" for name in "abcd"}


def test_a_release_is_blamed_through_what_it_takes_with_it() -> None:
    tried = []

    def passes(pins: Pins) -> bool:
        tried.append(tuple(pins.items()))
        return pins["d"] == "1"

    assert name_breaking("abc", resolve, passes) == [["b"]]
    assert len(tried) == len(set(tried)), "no versions are tried twice"


def test_no_release_is_blamed_for_what_fails_without_any_or_passes_with_all() -> None:
    assert name_breaking("abc", resolve, lambda _: False) is None
    assert name_breaking("abc", resolve, lambda _: True) == []


def test_what_breaks_is_said_with_versions_and_who_requires_it() -> None:
    named = [Named("engine", Requirement("a>=1"))]
    old, new = {"a": "1.0", "b": "1.0"}, {"a": "2.0", "b": "3.0"}
    assert describe_groups([["a"], ["b"]], old, new, named) == [
        "BREAKS: a 1.0 -> 2.0 (a>=1 of engine)",
        "BREAKS: b 1.0 -> 3.0 (required by others)",
    ]
    assert describe_groups([["a", "b"]], old, new, named)[0].startswith("BREAKS only together: a 1.0 -> 2.0, b 1.0 -> 3.0")
    assert "the lock too" in describe_groups(None, old, new, named)[0]
    assert "unsteady" in describe_groups([], old, new, named)[0]


@pytest.mark.parametrize(
    ("words", "machine", "wanted"),
    [
        (["torch==2.13.0"], "Linux x86_64", ["torch==2.10.0+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]),
        (["torch==2.13.0"], "Darwin arm64", ["torch==2.10.0"]),
        (["torch==2.13.0", "--index-url", "cu130"], "Linux x86_64", ["torch==2.10.0", "--index-url", "cu130"]),
        (["torch==2.13.0+cpu"], "Linux x86_64", ["torch==2.10.0+cpu"]),
    ],
)
def test_another_torch_is_of_the_same_build(words: list[str], machine: str, wanted: list[str]) -> None:
    assert choose_torch(words, "2.10.0", machine) == wanted


@pytest.fixture
def environment(tmp_path: Path) -> TrialEnvironment:
    """An environment of this Python, in which uv only writes down what it is called with."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    uv = folder / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" >> {folder / "calls"}\n[ ! -e {folder / "broken"} ]\n')
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "torch.json").write_text('{"words": ["torch==2.13.0"]}')
    for program in (uv, folder / "bin" / "python"):
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return TrialEnvironment(folder, tmp_path, str(uv), ["torch==2.13.0"])


def list_calls(environment: TrialEnvironment) -> list[list[str]]:
    """Return what uv was called with since the last time, without what all calls share."""
    calls = environment.folder / "calls"
    shared = {"pip", "--no-config", "--quiet", "--python", environment.python, "--no-deps"}
    said = (
        [[word for word in line.split() if word not in shared] for line in calls.read_text().splitlines()] if calls.exists() else []
    )
    calls.unlink(missing_ok=True)
    return said


def test_versions_are_exchanged_and_what_is_not_named_is_removed(environment: TrialEnvironment) -> None:
    environment.hold({"a": "1", "b": "1", "torch": "2.13.0", "nvidia-cublas": "13"})
    assert list_calls(environment) == [["install", "a==1", "b==1"]]
    environment.hold({"a": "2", "c": "1", "torch": "2.13.0"})
    assert list_calls(environment) == [["uninstall", "b"], ["install", "a==2", "c==1"]]
    environment.hold({"a": "2", "c": "1", "torch": "2.13.0"})
    assert list_calls(environment) == []


def test_after_an_interrupted_exchange_everything_is_installed_again(environment: TrialEnvironment) -> None:
    environment.hold({"a": "1", "torch": "2.13.0"})
    (environment.folder / "broken").touch()
    with pytest.raises(Exception, match="returned non-zero"):
        environment.hold({"a": "2", "torch": "2.13.0"})
    (environment.folder / "broken").unlink()
    list_calls(environment)
    environment.hold({"a": "1", "torch": "2.13.0"})
    assert list_calls(environment) == [["install", "a==1"]]


def test_a_torch_without_a_version_is_refused(environment: TrialEnvironment) -> None:
    with pytest.raises(SystemExit, match="names no version"):
        _ = TrialEnvironment(environment.folder, environment.root, "uv", ["torch>=2"]).own_torch


def test_failed_tests_and_files_that_are_not_collected_are_known(environment: TrialEnvironment) -> None:
    (environment.root / "test_one.py").write_text("def test_bad(): assert False\ndef test_good(): pass\n")
    (environment.root / "test_two.py").write_text("import nothing_of_this_name\n")
    arguments = ["-p", "no:randomly", "--continue-on-collection-errors", "test_one.py", "test_two.py"]
    assert environment.run_tests(arguments, environment.folder / "said") == 1
    assert environment.list_failed() == ["test_one.py::test_bad", "test_two.py"]
    environment.forget_failed()
    assert environment.list_failed() == []
