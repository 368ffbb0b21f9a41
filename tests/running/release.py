"""`nox -s release -- VERSION [DISTRIBUTION ...]`: raise versions, changelogs and the range of the engine together; without names, of all.

It edits files and does nothing else: it commits, tags, signs and uploads nothing. Nothing is written unless all of it can be.

A plugin's range begins at the engine that it is released beside, which is the one that it was tested with, and ends before the next minor
version. So a minor version is the only place for a change of contract: a patch version that takes or changes something public is refused.
What was public is docs/reference/public-api.txt at the tag of the last release, `vX.Y.Z`.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import public_api
from packaging.version import Version

from skyrl_engine.errors import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "skyrl-engine"
RANGE = re.compile(r'(?<="skyrl-engine)>=[^"\[\]]+(?=")')
"""The range in a requirement on the engine itself."""
UNRELEASED = "Unreleased"
OWN_TEST = "tests/architecture/test_release.py"
"""The test of this program, whose example stays at its version."""


@dataclass(frozen=True)
class Project:
    """A distribution of this repository: where its `pyproject.toml` lies, and its version."""

    folder: Path
    name: str
    version: Version
    has_range: bool

    @property
    def version_file(self) -> Path:
        return self.folder / ("skyrl_engine/__init__.py" if self.name == ENGINE else "pyproject.toml")


def read_projects(root: Path) -> dict[str, Project]:
    """Return the distributions under `root` by name, the engine first."""
    projects = {}
    for file in (root / "pyproject.toml", *sorted(root.glob("[!.]*/*/pyproject.toml"))):
        text = file.read_text(encoding="utf-8")
        table = tomllib.loads(text)["project"]
        stated = (
            table.get("version")
            or re.findall(r'^__version__ = "(.+)"$', (root / "skyrl_engine/__init__.py").read_text(), re.MULTILINE)[0]
        )
        projects[table["name"]] = Project(file.parent, table["name"], Version(stated), has_range=bool(RANGE.search(text)))
    return projects


def set_version(text: str, version: Version) -> str:
    """Return a `pyproject.toml`, or the engine's `__init__.py`, with another version."""
    changed, count = re.subn(r'^((?:__version__|version) = )".+"$', rf'\g<1>"{version}"', text, flags=re.MULTILINE)
    assert count == 1, f"{count} lines state a version"
    return changed


def state_range(engine: Version) -> str:
    """Return the range of engines for a plugin that is released beside this one."""
    lowest = f"{engine.major}.{engine.minor}" + (f".{engine.micro}" if engine.micro else "")
    return f">={lowest},<{engine.major}.{engine.minor + 1}"


def set_range(text: str, engine: Version) -> str:
    return RANGE.sub(state_range(engine), text)


def open_section(text: str, version: Version, beside: Version | None) -> str:
    """Return a changelog whose first section is the version's: what was `Unreleased`, or a new one.

    `beside` is the engine that a plugin is released with, which the section then names; None for what has no range.
    """
    first = re.search(r"^## (.+)$", text, re.MULTILINE)
    start = first.start() if first else len(text.rstrip()) + 2
    text = text if first else text.rstrip() + "\n\n"
    if first and first[1] in (UNRELEASED, str(version)):
        text = text[:start] + f"## {version}" + text[first.end() :]
    else:
        text = text[:start] + f"## {version}\n\n" + text[start:]
    end = start + len(f"## {version}\n\n")
    line = "" if beside is None else f"- For skyrl-engine {state_range(beside)[2:].partition(',')[0]}.\n"
    section = text[end:].partition("\n## ")[0]
    if line and line not in section:
        text = text[:end] + line + ("\n" if not section.strip() or section.startswith("## ") else "") + text[end:]
    return text.rstrip() + "\n"


def list_edits(root: Path, version: Version, names: Sequence[str]) -> dict[Path, str]:
    """Return the new text of every file that a release changes. Raises UnsupportedError for a release that must not be."""
    projects = read_projects(root)
    if unknown := sorted(set(names) - set(projects)):
        raise UnsupportedError(f"there is no distribution {', '.join(unknown)} here", remedy=f"Choose from {', '.join(projects)}")
    chosen = {name: project for name, project in projects.items() if not names or name in names}
    if old := [f"{name} {project.version}" for name, project in chosen.items() if version <= project.version]:
        raise UnsupportedError(
            f"{version} is not newer than {shorten(old)}", remedy="Choose a newer version, or fewer distributions"
        )
    engine = projects[ENGINE]
    beside = version if ENGINE in chosen else engine.version
    is_new_minor = (beside.major, beside.minor) != (engine.version.major, engine.version.minor)
    if is_new_minor and (left := [name for name, project in projects.items() if project.has_range and name not in chosen]):
        raise UnsupportedError(
            f"an engine of version {beside} would refuse {shorten(left)}, whose ranges end before it",
            remedy=f"Release all together: nox -s release -- {version}",
        )
    if ENGINE in chosen:
        check_contract(root, engine.version, version)
    elif any(project.has_range for project in chosen.values()):
        check_released(root, engine.version)
    edits: dict[Path, str] = {}
    for project in chosen.values():
        file = project.version_file
        edits[file] = set_version(file.read_text(encoding="utf-8"), version)
        if project.has_range:
            edits[file] = set_range(edits[file], beside)
        file = project.folder / "CHANGELOG.md"
        edits[file] = open_section(file.read_text(encoding="utf-8"), version, beside if project.has_range else None)
        if project.name == ENGINE and "- " not in edits[file].split("\n## ")[1]:
            raise UnsupportedError(
                "CHANGELOG.md says nothing about this release", remedy=f"Say under `## {UNRELEASED}` what changed"
            )
    if is_new_minor:
        edits |= dict(_edit_examples(root, engine.version, beside))
    return edits


def _edit_examples(root: Path, old: Version, new: Version) -> Iterator[tuple[Path, str]]:
    """Yield pages and tests that state the range of a plugin for the engine of the sources."""
    stated = f"skyrl-engine{state_range(Version(f'{old.major}.{old.minor}.0'))}"
    for name in git(root, "grep", "-l", "-F", stated, "--", "docs", "tests", f":!{OWN_TEST}").splitlines():
        yield root / name, (root / name).read_text(encoding="utf-8").replace(stated, f"skyrl-engine{state_range(new)}")


def check_contract(root: Path, old: Version, new: Version) -> None:
    """Raise UnsupportedError where a patch version would take or change something public, or where it cannot be known."""
    text = (root / public_api.FILE).read_text(encoding="utf-8")
    if text != public_api.read_public_api(root):
        raise UnsupportedError(
            f"{public_api.FILE} is not what the sources say", remedy="Run python tests/running/public_api.py, and commit it"
        )
    if (old.major, old.minor) != (new.major, new.minor):
        return
    released = read_released(root, old)
    if reasons := public_api.list_breaking(released, text):
        raise UnsupportedError(
            f"plugins and programs for {old} may fail with {new}: {shorten(reasons, '; ')}",
            remedy=f"Release a new minor version, {old.major}.{old.minor + 1}.0, or bring back what changed",
        )


def check_released(root: Path, version: Version) -> None:
    """Raise UnsupportedError where plugins were tested beside an engine that nobody can install."""
    if (root / public_api.FILE).read_text(encoding="utf-8") != read_released(root, version):
        raise UnsupportedError(
            f"what is public here is not what was released as {version}, with which the range would begin",
            remedy=f"Release the engine too: name {ENGINE} as well",
        )


def read_released(root: Path, version: Version) -> str:
    """Return what was public in a version of the engine. Raises UnsupportedError where its tag is not here."""
    tag = f"v{version}"
    try:
        return git(root, "show", f"{tag}:{public_api.FILE}")
    except subprocess.CalledProcessError as error:
        raise UnsupportedError(
            f"what was public in {version} is not known: there is no tag {tag} with {public_api.FILE}",
            remedy=f"Fetch it (git fetch --tags), or tag the commit that was released as {version}",
        ) from error


def check_clean(root: Path) -> None:
    """Raise UnsupportedError where files differ from the last commit."""
    if changed := git(root, "status", "--porcelain").splitlines():
        raise UnsupportedError(
            f"files are not as committed: {shorten([line[3:] for line in changed])}", remedy="Commit or stash them"
        )


def shorten(items: Sequence[str], between: str = ", ") -> str:
    """Return the first five of some items, and how many more there are."""
    return between.join([*items[:5], *([f"and {len(items) - 5} more"] if len(items) > 5 else [])])


def git(root: Path, *arguments: str) -> str:
    """Return what git prints. Raises CalledProcessError where it fails."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def parse_version(text: str) -> Version:
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", text):
        raise UnsupportedError(f"{text!r} is not a version of three numbers", remedy="Write it as 0.3.1")
    return Version(text)


def describe(before: Mapping[str, Project], after: Mapping[str, Project]) -> Iterator[str]:
    for name, project in after.items():
        if project.version != before[name].version:
            yield f"{name} {before[name].version} -> {project.version}"


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    if not arguments or any(word.startswith("-") for word in arguments):
        print("usage: nox -s release -- VERSION [DISTRIBUTION ...]", file=sys.stderr)
        return 2
    try:
        version = parse_version(arguments[0])
        check_clean(root)
        before = read_projects(root)
        edits = list_edits(root, version, arguments[1:])
    except UnsupportedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file, text in edits.items():
        file.write_text(text, encoding="utf-8")
    after = read_projects(root)
    print(*describe(before, after), sep="\n")
    tags = [f"v{version}"] if after[ENGINE].version != before[ENGINE].version else [f"{name}-v{version}" for name in arguments[1:]]
    print(f"{len(edits)} files changed. Next: git diff, nox -s dist, git commit, then git tag {' '.join(tags)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
