"""Tests with the lowest, or with the newest, versions that the requirements of all distributions allow, in an environment of their own.

    python tests/running/requirement_bounds.py oldest --torch "torch==2.13.0" -- -m "not nightly" tests/contracts

is `nox -s oldest`. What follows `--` are pytest's arguments. The program

1. resolves what all pyproject.toml name, extras included. Development tools stay at the versions of requirements-lock.txt. For `oldest`, what
   others require stays there too where it can: a release of theirs that breaks its own users says nothing of our bounds;
2. fails if a requirement names a lower bound that another requirement keeps from being installed: nobody can have tested it;
3. installs the versions under .cache/oldest or .cache/newest. Where no build of the wanted torch for this machine's processors can be had, the
   machine's torch stays, and this is said in capitals;
4. runs the tests. If some fail, it repeats those with ever fewer of the versions changed, and says which release breaks them.
"""

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from breaking_releases import find_breaking
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from resolver import NoVersionsError, Pins, Resolver, find_uv, read_pins
from trial_environment import TrialEnvironment

ROOT = Path(__file__).parents[2]
APART = {"trackio"}
"""Packages with a session of their own, because they keep others from their newest versions: `nox -s trackio` tests the lowest one."""
OLD_WARNINGS = [f"-Wdefault::{name}" for name in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")]
"""Old releases warn of Pythons and packages that are newer than they are; that is no failure of a bound."""


@dataclass(frozen=True)
class Named:
    """One requirement on a package of others, and the distribution whose pyproject.toml names it."""

    who: str
    requirement: Requirement

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def bound(self) -> Version | None:
        """The lower bound, None without one."""
        return max((Version(part.version) for part in self.requirement.specifier if part.operator == ">="), default=None)

    def __str__(self) -> str:
        return f"{self.requirement} of {self.who}"


def list_named(root: Path) -> list[Named]:
    """Return what the pyproject.toml of every distribution requires of others, extras included."""
    files = [root / "pyproject.toml", *sorted(root.glob("[!.]*/*/pyproject.toml"))]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    own = {canonicalize_name(project["name"]) for project in projects}
    named = [
        Named(project["name"], Requirement(line))
        for project in projects
        for lines in (project.get("dependencies", []), *project.get("optional-dependencies", {}).values())
        for line in lines
    ]
    return [each for each in named if each.name not in own | APART]


def list_tools(root: Path) -> set[str]:
    """Return the names of requirements-dev.txt that are no distribution of ours: what develops and tests them."""
    lines = (root / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith(("-", "#"))}


def read_reasons(text: str) -> dict[str, list[str]]:
    """Return who requires each package of a resolution, from uv's `# via` comments."""
    found = re.findall(r"^([a-z0-9-]+)==.*\n((?: +#.*\n)*)", text, re.MULTILINE)
    return {
        name: [word for word in comments.replace("#", " ").split() if word not in ("via", "-r", "-")] for name, comments in found
    }


def list_unreached(named: Iterable[Named], pins: Pins, reasons: Mapping[str, list[str]]) -> list[str]:
    """Return a sentence per lower bound that is not what the lowest versions hold."""
    return [
        f"{each}: {pins[each.name]} is installed, because of {', '.join(reasons.get(each.name, [])) or 'another requirement'}"
        for each in named
        if each.bound is not None and Version(pins[each.name]) != each.bound
    ]


@dataclass(frozen=True)
class Session:
    """The common part of `oldest` and `newest`, which change some packages and leave all others as locked."""

    resolver: Resolver
    named: Sequence[Named]
    tools: Pins
    lock: Pins

    def resolve(self, torch: str | None) -> tuple[Pins, str]:
        """Return the versions to try, and uv's text. `torch` is the version to hold, None for none."""
        raise NotImplementedError

    def resolve_some(self, changed: Pins, torch: str) -> Pins:
        """Return the lock with these versions, and others changed where they would not fit."""
        pinned = [f"{name}=={version}" for name, version in sorted(changed.items()) if name != "torch"]
        return self.resolver.resolve([*self.list_requirements(torch), *pinned], self.lock)[0]

    def list_changed(self, pins: Pins) -> list[str]:
        """Return the packages that are not as locked. What the lock does not hold came with one of them."""
        return sorted(name for name in pins.keys() & self.lock.keys() if pins[name] != self.lock[name])

    def list_requirements(self, torch: str | None) -> list[str]:
        tools = [f"{name}=={version}" for name, version in self.tools.items()]
        return [*sorted({str(each.requirement) for each in self.named}), *tools, *([f"torch=={torch}"] if torch else [])]


@dataclass(frozen=True)
class Oldest(Session):
    """The lowest versions of what we name, and all else as locked where that fits."""

    def list_changed(self, pins: Pins) -> list[str]:
        """Return the packages that we name and that are not as locked: they decide what the others are."""
        direct = {each.name for each in self.named}
        return [name for name in super().list_changed(pins) if name in direct]

    def resolve(self, torch: str | None) -> tuple[Pins, str]:
        direct = {each.name for each in self.named}
        # A torch that is held prefers newer releases of what it shares with others; the lowest ones are those without it.
        lowest = {} if torch is None else self.resolve(None)[0]
        pinned = [f"{name}=={lowest[name]}" for name in sorted(direct & lowest.keys()) if name != "torch"]
        prefer = {name: version for name, version in self.lock.items() if name not in direct}
        return self.resolver.resolve([*self.list_requirements(torch), *pinned], prefer, "--resolution", "lowest-direct")


@dataclass(frozen=True)
class Newest(Session):
    """The newest releases of everything that is installed."""

    def resolve(self, torch: str | None) -> tuple[Pins, str]:
        return self.resolver.resolve(self.list_requirements(torch), {}, "--upgrade")


def name_breaking(
    changed: Sequence[str], resolve: Callable[[Sequence[str]], Pins], passes: Callable[[Pins], bool]
) -> list[list[str]] | None:
    """Return the groups of changed packages that break the tests; None where they fail without any change.

    An empty list says that the tests pass with all of them changed. Versions that do not fit together break nothing.
    """
    known: dict[frozenset[tuple[str, str]], bool] = {}

    def breaks(names: Sequence[str]) -> bool:
        try:
            pins = resolve(names)
        except NoVersionsError:
            return False
        key = frozenset(pins.items())
        if key not in known:
            known[key] = not passes(pins)
        return known[key]

    return None if breaks([]) else [list(group) for group in find_breaking(changed, breaks)]


def describe_groups(groups: list[list[str]] | None, old: Pins, new: Pins, named: Sequence[Named]) -> list[str]:
    """Return the lines that name the releases which break the tests."""
    if groups is None:
        return ["The same tests fail with the versions of the lock too: no release of another project is the reason."]
    if not groups:
        return ["The same tests pass when they run again with the same versions: they are unsteady, and no release is named."]
    lines = []
    for group in groups:
        shown = [f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in group]
        whose = sorted({str(each) for each in named if each.name in group})
        together = " only together" if len(group) > 1 else ""
        lines.append(f"BREAKS{together}: {', '.join(shown)} ({'; '.join(whose) or 'required by others'})")
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument("--torch", required=True, help="pip's words for the machine's torch")
    parser.add_argument("pytest", nargs="+", help="pytest's arguments, after --")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    lock = read_pins((ROOT / "requirements-lock.txt").read_text(encoding="utf-8"))
    resolver, tools = Resolver(find_uv(ROOT), ROOT), {name: lock[name] for name in sorted(list_tools(ROOT))}
    environment = TrialEnvironment(ROOT / ".cache" / options.which, ROOT, resolver.uv, shlex.split(options.torch))
    lock["torch"] = environment.own_torch
    session = (Oldest if options.which == "oldest" else Newest)(resolver, list_named(ROOT), tools, lock)
    try:
        pins, text = session.resolve(None)
        unreached = list_unreached(session.named, pins, read_reasons(text)) if isinstance(session, Oldest) else []
        environment.make()
        torch = pins["torch"]
        untested = [] if environment.install_torch(torch) else [torch]
        if untested:
            pins, _ = session.resolve(lock["torch"])
    except NoVersionsError as error:
        sys.exit(resolver.explain(error))
    changed = session.list_changed(pins)
    say([f"{name} {lock[name]} -> {pins[name]}" for name in changed])
    say([f"{len(changed)} packages are not as locked, {len(pins) - len(changed)} are."])
    broken = bool(changed) and run_all(session, environment, pins, changed, options.pytest)
    say([f"NOT REACHED: {line}. Raise the bound to what is installed." for line in unreached])
    say(
        [
            f"NOT TESTED HERE: torch {version}. No build of it for this machine was found, so its torch stayed."
            for version in untested
        ]
    )
    sys.exit(1 if broken or unreached else 0)


def run_all(session: Session, environment: TrialEnvironment, pins: Pins, changed: Sequence[str], arguments: Sequence[str]) -> bool:
    """Run the tests with these versions; if some fail, look for the releases that break them, and say which. Return whether some fail."""
    quiet = OLD_WARNINGS if isinstance(session, Oldest) else []
    environment.hold(pins)
    environment.install_projects()
    environment.forget_failed()
    if not environment.run_tests([*arguments, *quiet]):
        return False
    # Where pytest did not get as far as a test, all of them are repeated.
    failed = environment.list_failed()
    repeat = ["--exitfirst", *quiet, *(failed or arguments)]
    say([f"{len(failed) or 'No'} failed tests are known; they run again with fewer of these packages changed."])

    def resolve(names: Sequence[str]) -> Pins:
        if not names or set(names) == set(changed):
            return pins if names else session.lock
        return session.resolve_some({name: pins[name] for name in names}, (pins if "torch" in names else session.lock)["torch"])

    def passes(trial: Pins) -> bool:
        environment.hold(trial)
        status = environment.run_tests(repeat, environment.folder / "trial.log")
        say([f"{len(session.list_changed(trial))} packages changed: {'some fail' if status else 'they pass'}"])
        return not status

    say(describe_groups(name_breaking(changed, resolve, passes), session.lock, pins, session.named))
    return True


def say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
