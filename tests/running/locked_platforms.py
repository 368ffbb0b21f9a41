"""Which files of the lock install on which platform and Python: uv lists the files of the index, the tags of the wheels decide."""

import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename
from resolver import Resolver


@dataclass(frozen=True)
class Platform:
    """A machine: its name on the page, and what pip would find on it. `accepted` are tags of platforms, the best one first."""

    name: str
    system: str
    machine: str
    accepted: tuple[str, ...]

    def describe(self, python: str) -> dict[str, str]:
        """Return the environment in which pip evaluates markers there."""
        return {
            "extra": "",
            "implementation_name": "cpython",
            "implementation_version": f"{python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Darwin" if self.system == "darwin" else "Linux",
            "platform_version": "",
            "python_full_version": f"{python}.0",
            "python_version": python,
            "sys_platform": self.system,
        }

    def list_tags(self, python: str) -> frozenset[Tag]:
        """Return the tags of wheels that CPython takes there."""
        major, minor = (int(part) for part in python.split("."))
        own = cpython_tags((major, minor), platforms=self.accepted)
        return frozenset([*own, *compatible_tags((major, minor), f"cp{major}{minor}", self.accepted)])


def describe_linux(machine: str, glibc: int) -> Platform:
    """Return a Linux with glibc 2.`glibc`, under both kinds of names of its tags (PEP 600, PEP 599)."""
    older = ("manylinux2014", "manylinux2010", "manylinux1") if machine == "x86_64" else ("manylinux2014",)
    named = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
    return Platform(
        f"Linux {machine}, glibc 2.{glibc}",
        "linux",
        machine,
        (*named, *(f"{name}_{machine}" for name in older), f"linux_{machine}"),
    )


def describe_mac(machine: str, version: int) -> Platform:
    chip = "Apple silicon" if machine == "arm64" else "Intel"
    return Platform(f"macOS {version}, {chip}", "darwin", machine, tuple(mac_platforms((version, 0), machine)))


PLATFORMS = (
    describe_linux("x86_64", 28),
    describe_linux("aarch64", 28),
    describe_mac("arm64", 14),
    describe_mac("x86_64", 14),
)


@dataclass(frozen=True)
class Finding:
    """Packages without a wheel for a platform and a Python: `sources` must be built there, `missing` have no file at all."""

    sources: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def find_gaps(packages: Iterable[Mapping[str, Any]], platform: Platform, python: str) -> Finding:
    """Return what of a lock (the packages of a pylock.toml, PEP 751) is no wheel on a platform, as names with versions."""
    environment, tags = platform.describe(python), platform.list_tags(python)
    sources, missing = [], []
    for package in packages:
        if "marker" in package and not Marker(package["marker"]).evaluate(environment):
            continue
        names = [wheel.get("name") or wheel["url"].rpartition("/")[2] for wheel in package.get("wheels", [])]
        if not any(tags & parse_wheel_filename(name)[3] for name in names):
            (sources if "sdist" in package else missing).append(f"{package['name']} {package['version']}")
    return Finding(tuple(sorted(sources)), tuple(sorted(missing)))


def list_unknown_files(packages: Iterable[Mapping[str, Any]], lock: str) -> list[str]:
    """Return the files that pip would refuse, because their hashes are not in the lock: uploaded after it was written, or exchanged."""
    found = (file for package in packages for file in (*package.get("wheels", []), *filter(None, [package.get("sdist")])))
    return [file["url"].rpartition("/")[2] for file in found if f"sha256:{file['hashes']['sha256']}" not in lock]


def read_files(resolver: Resolver, lock: str) -> list[dict[str, Any]]:
    """Return every file that the index has of what a lock names, as packages of a pylock.toml.

    Raises:
        NoVersionsError: the index does not answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "pylock.toml"
        options = ("--universal", "--python-version", "3.11", "--no-deps", "--format", "pylock.toml", "--output-file", str(output))
        resolver.compile(*options, requirements=lock)
        return tomllib.loads(output.read_text(encoding="utf-8"))["packages"]


def write_rows(found: Mapping[tuple[Platform, str], Finding]) -> Iterator[str]:
    """Yield a row of the page per platform and group of Pythons of the same finding."""
    by_platform: dict[Platform, dict[Finding, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (platform, python), finding in found.items():
        by_platform[platform][finding].append(python)
    for platform, findings in by_platform.items():
        for finding, pythons in findings.items():
            verdict = f"no: no file of {', '.join(finding.missing)}" if finding.missing else "yes"
            yield f"| {platform.name} | {', '.join(pythons)} | {verdict} | {', '.join(finding.sources) or 'nothing'} |"


HEAD = """# Platforms

`requirements-lock.txt` is one lock for all platforms and Pythons below. The table says where pip finds a file for every package of the lock
and for torch: a wheel whose tags fit, or else sources, which pip builds. `nox -s lock` writes this page from the files that the package index
lists, and installs nothing for it; [Dependencies](../explanation/dependencies.md#ranges-that-were-tested) says what was also run.

| platform | Python | installs | built from sources |
|---|---|---|---|
"""


def write_page(packages: Sequence[Mapping[str, Any]], pythons: Sequence[str]) -> str:
    """Return the page, in Markdown."""
    rows = write_rows({(platform, python): find_gaps(packages, platform, python) for platform in PLATFORMS for python in pythons})
    return HEAD + "\n".join(rows) + "\n"
