"""requirements-lock.txt holds what requirements-dev.txt and every pyproject.toml ask for, so that `nox` installs with `--no-deps`."""

import importlib.metadata
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-lock.txt"
TORCH = "torch"
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("[!.]*/*/pyproject.toml"))]


def lines() -> list[str]:
    """Return the lock's entries, each joined to one line, without comments."""
    text = "\n".join(line for line in LOCK.read_text().splitlines() if not line.lstrip().startswith("#"))
    return [" ".join(entry.split()) for entry in text.replace("\\\n", " ").splitlines() if entry.strip()]


@cache
def read_lock() -> dict[str, list[Version]]:
    """Return the versions of every package; several where they differ by platform or Python."""
    versions = defaultdict(list)
    for line in lines():
        requirement = Requirement(line.partition(" --hash=")[0])
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        versions[canonicalize_name(requirement.name)].append(Version(pin.version))
    return dict(versions)


@cache
def projects() -> dict[str, dict]:
    tables = [tomllib.loads(path.read_text()) for path in PROJECTS]
    return {table["project"]["name"]: table for table in tables}


def editable() -> list[tuple[str, str]]:
    """Return folders and extras of the project's own distributions that requirements-dev.txt installs."""
    return re.findall(r"^-e ([^\[\s]+)(?:\[(.+)\])?$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)


def list_wanted() -> Iterator[tuple[str, str]]:
    """Yield (who, requirement) of every requirement on a package of others, build requirements among them."""
    for line in (ROOT / "requirements-dev.txt").read_text().splitlines():
        if line and not line.startswith(("-", "#")):
            yield "requirements-dev.txt", line
    for folder, extras in editable():
        table = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
        project = table["project"]
        unknown = set(filter(None, extras.split(","))) - set(project.get("optional-dependencies", {}))
        assert not unknown, f"{folder} has no extras {unknown}"
        requirements = [*project.get("dependencies", []), *table["build-system"]["requires"]]
        for extra in filter(None, extras.split(",")):
            requirements += project["optional-dependencies"][extra]
        for line in requirements:
            yield project["name"], line


def problem(who: str, line: str) -> str | None:
    """Say what the lock lacks of a requirement, None where it lacks nothing."""
    requirement = Requirement(line)
    name = canonicalize_name(requirement.name)
    if name == TORCH or name in projects() or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
        return None
    if name not in read_lock():
        return f"{who} wants {line}, which is not locked"
    wrong = [str(version) for version in read_lock()[name] if not requirement.specifier.contains(version, prereleases=True)]
    return f"{who} wants {line}, and {', '.join(wrong)} is locked" if wrong else None


REMEDY = "run `nox -s lock`"


def test_every_requirement_is_locked():
    missing = [each for each in (problem(who, line) for who, line in list_wanted()) if each]
    assert not missing, (REMEDY, missing)


def test_what_locked_packages_require_is_locked():
    """Without this, `--no-deps` would leave one out. Looked at are the packages that are installed here in the locked version."""
    missing, looked = [], 0
    for name, versions in read_lock().items():
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(found.version) in versions:
            looked += 1
            missing += filter(None, (problem(name, line) for line in found.requires or ()))
    assert not missing, (REMEDY, missing)
    assert looked > 100, "this environment is not what the lock says: run `nox -s tests` once"


def test_builds_without_isolation_find_their_backend():
    """The project's own distributions are built with what the lock installs; hatchling's editable wheels need `editables`."""
    assert {"hatchling", "editables"} <= read_lock().keys()


def test_every_distribution_of_the_project_is_installed():
    assert sorted((ROOT / folder / "pyproject.toml").resolve() for folder, _ in editable()) == sorted(PROJECTS)


def test_an_entry_is_a_pin_with_hashes_and_nothing_else():
    entry = re.compile(r"[a-z0-9-]+==[^\s;]+( ; [^\\]+?)?( --hash=sha256:[0-9a-f]{64})+")
    assert not [line for line in lines() if not entry.fullmatch(line)]


def test_neither_torch_nor_what_its_builds_bring_nor_a_place_is_locked():
    """Torch is chosen by SKYRL_ENGINE_TORCH, and a build for CPUs needs none of CUDA's packages."""
    assert not [name for name in read_lock() if name == TORCH or name.startswith(("nvidia-", "cuda-", "triton"))]
    assert not read_lock().keys() & {canonicalize_name(name) for name in projects()}
    assert not re.search(r"://|--index|--extra-index|--find-links|(?<![\w.])/\w", LOCK.read_text())
