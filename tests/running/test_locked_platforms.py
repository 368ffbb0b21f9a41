"""Platforms on which a lock installs, by the tags of its wheels: Python's own answer for this machine, and made-up packages for all others."""

import platform
import sys

import pytest
from locked_platforms import PLATFORMS, Finding, describe_linux, find_gaps, list_unknown_files, write_page
from packaging.tags import sys_tags

LINUX, ARM, MAC, INTEL = PLATFORMS


def package(name: str, *wheels: str, sources: bool = False, **fields: str) -> dict[str, object]:
    """A package of a pylock.toml, all of whose files have the hash "a"."""
    files = [{"url": f"there/{name}-1.0-{tags}.whl", "hashes": {"sha256": "a"}} for tags in wheels]
    own = {"sdist": {"url": f"there/{name}-1.0.tar.gz", "hashes": {"sha256": "a"}}} if sources else {}
    return {"name": name, "version": "1.0", "wheels": files, **own, **fields}


@pytest.mark.parametrize(
    ("tags", "fits"),
    [
        ("py3-none-any", {LINUX, ARM, MAC, INTEL}),
        ("py2.py3-none-any", {LINUX, ARM, MAC, INTEL}),
        ("cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64", {LINUX}),
        ("cp312-cp312-manylinux_2_28_aarch64", {ARM}),
        ("cp312-cp312-manylinux_2_34_aarch64", set()),
        ("cp311-cp311-manylinux_2_28_x86_64", set()),
        ("cp312-cp312t-manylinux_2_28_x86_64", set()),
        ("cp312-cp312-musllinux_1_2_x86_64", set()),
        ("cp312-cp312-macosx_11_0_arm64", {MAC}),
        ("cp312-cp312-macosx_15_0_arm64", set()),
        ("cp312-cp312-macosx_10_9_x86_64", {INTEL}),
        ("cp312-cp312-macosx_10_13_universal2", {MAC, INTEL}),
        ("cp312-cp312-win_amd64", set()),
    ],
)
def test_a_wheel_fits_where_its_tags_do(tags: str, fits: set[object]) -> None:
    assert {each for each in PLATFORMS if not find_gaps([package("one", tags)], each, "3.12").missing} == fits


@pytest.mark.skipif(sys.platform != "linux", reason="compares with the tags of a Linux")
def test_the_tags_of_a_linux_are_those_that_python_finds_on_one() -> None:
    name, version = platform.libc_ver()
    if name != "glibc":
        pytest.skip(f"no glibc here: {name or 'unknown'}")
    here = describe_linux(platform.machine(), int(version.split(".")[1]))
    assert here.list_tags(f"{sys.version_info[0]}.{sys.version_info[1]}") == frozenset(sys_tags())


def test_sources_are_built_where_no_wheel_fits_and_without_them_nothing_installs() -> None:
    packages = [package("one", "cp312-cp312-macosx_11_0_arm64", sources=True), package("two", "cp312-cp312-macosx_11_0_arm64")]
    assert find_gaps(packages, LINUX, "3.12") == Finding(("one 1.0",), ("two 1.0",))
    assert find_gaps(packages, MAC, "3.12") == Finding()


def test_what_a_marker_excludes_is_not_wanted() -> None:
    packages = [package("one", marker="sys_platform == 'win32'"), package("two", marker="python_full_version < '3.12'")]
    assert find_gaps(packages, LINUX, "3.12") == Finding()
    assert find_gaps(packages, LINUX, "3.11") == Finding((), ("two 1.0",))


def test_a_file_whose_hash_is_not_locked_is_named() -> None:
    packages = [package("one", "py3-none-any", sources=True)]
    assert list_unknown_files(packages, "--hash=sha256:a") == []
    assert list_unknown_files(packages, "--hash=sha256:b") == ["one-1.0-py3-none-any.whl", "one-1.0.tar.gz"]


def test_the_page_has_a_row_for_pythons_of_the_same_finding() -> None:
    page = write_page(
        [package("one", "cp311-cp311-manylinux_2_28_x86_64", "cp312-cp312-manylinux_2_28_x86_64")], ["3.11", "3.12", "3.13"]
    )
    rows = [line for line in page.splitlines() if line.startswith("| Linux x86_64")]
    assert rows == [
        "| Linux x86_64, glibc 2.28 | 3.11, 3.12 | yes | nothing |",
        "| Linux x86_64, glibc 2.28 | 3.13 | no: no file of one 1.0 | nothing |",
    ]
