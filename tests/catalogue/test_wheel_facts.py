"""A wheel is read without being unpacked; one that lies, or that no wheel is like, is refused."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest

from skyrl_engine.catalogue import wheel_facts
from skyrl_engine.catalogue.wheel_facts import rank_tags, read_wheel
from skyrl_engine.errors import PluginIndexError

NAME = "acme_tiny-0.1.0-py3-none-any.whl"


def rewrite(wheel: Path, target: Path, change: Callable[[str, bytes], tuple[str, bytes]], *more: tuple[str, bytes]) -> Path:
    """Write a wheel's files into another one, each as `change` returns it, and `more` files after them."""
    with ZipFile(wheel) as source, ZipFile(target, "w", ZIP_DEFLATED) as copy:
        for member in source.infolist():
            copy.writestr(*change(member.filename, source.read(member)))
        for name, content in more:
            copy.writestr(name, content)
    return target


def alike(name: str, content: bytes) -> tuple[str, bytes]:
    return name, content


def in_metadata(old: str, new: str) -> Callable[[str, bytes], tuple[str, bytes]]:
    def change(name: str, content: bytes) -> tuple[str, bytes]:
        return name, content.replace(old.encode(), new.encode()) if name.endswith("METADATA") else content

    return change


def test_a_wheel_says_what_it_offers(tiny: Path) -> None:
    facts = read_wheel(tiny)
    assert (facts.name, facts.version, facts.file) == ("acme-tiny", "0.1.0", NAME)
    assert facts.sha256 == hashlib.sha256(tiny.read_bytes()).hexdigest()
    assert facts.size == tiny.stat().st_size
    assert facts.plugins == (("reducer", "acme_tiny"),)
    assert (facts.requires_engine, facts.requires_python) == ("<0.4,>=0.3", ">=3.11")
    assert (facts.license, facts.homepage) == ("MIT", "https://acme.example/reducers")
    assert rank_tags(facts.tags) is not None
    assert not facts.is_engine


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Name: acme-tiny", "Name: acme-other", "holds acme-other 0.1.0, which its name does not say"),
        ("Version: 0.1.0", "Version: 0.1.1", "holds acme-tiny 0.1.1"),
        ("Version: 0.1.0", "Version: soon", "cannot be read"),
        ("Requires-Python: >=3.11", "Requires-Python: three", "cannot be read"),
        ("Requires-Dist: skyrl-engine", "Requires-Dist: !!", "cannot be read"),
    ],
)
def test_metadata_that_lies_is_refused(tiny: Path, tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in (metadata := ZipFile(tiny).read("acme_tiny-0.1.0.dist-info/METADATA").decode()), metadata
    with pytest.raises(PluginIndexError, match=words):
        read_wheel(rewrite(tiny, tmp_path / NAME, in_metadata(old, new)))


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil", "acme_tiny/../../evil.py", "acme_tiny\\..\\evil.py", "C:/evil.py"])
def test_a_file_that_would_be_written_elsewhere_is_refused(tiny: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(PluginIndexError, match="outside of its folder"):
        read_wheel(rewrite(tiny, tmp_path / NAME, alike, (name, b"x")))


def test_sizes_that_no_wheel_has_are_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = rewrite(tiny, tmp_path / NAME, alike, ("acme_tiny/zeros", b"\0" * 3_000_000))
    assert bomb.stat().st_size < 10_000
    monkeypatch.setattr(wheel_facts, "LARGEST_UNPACKED", 2_000_000)
    with pytest.raises(PluginIndexError, match="more than a wheel holds"):
        read_wheel(bomb)
    monkeypatch.setattr(wheel_facts, "LARGEST_WHEEL", 100)
    with pytest.raises(PluginIndexError, match="100 are the most"):
        read_wheel(bomb)


def test_metadata_that_unpacks_to_much_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(PluginIndexError, match="bytes of metadata"):
        read_wheel(rewrite(tiny, tmp_path / NAME, in_metadata("Metadata-Version", "X: " + "y" * 2**21 + "\nMetadata-Version")))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (NAME, b"", "has 0 bytes"),
        (NAME, b"<html>", "cannot be read: BadZipFile"),
        ("acme.whl", b"x", "no name of a wheel"),
        ("acme_tiny-x-py3-none-any.whl", b"x", "no name of a wheel"),
    ],
)
def test_what_is_no_wheel_is_said(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PluginIndexError, match=words):
        read_wheel(tmp_path / name)


def test_a_zip_without_metadata_or_with_two_is_refused(tiny: Path, tmp_path: Path) -> None:
    with ZipFile(tmp_path / NAME, "w") as empty:
        empty.writestr("a.py", "")
    with pytest.raises(PluginIndexError, match="0 folders of metadata"):
        read_wheel(tmp_path / NAME)
    with pytest.raises(PluginIndexError, match="2 folders of metadata"):
        read_wheel(rewrite(tiny, tmp_path / NAME, alike, ("other-1.dist-info/METADATA", b"Name: other")))


def test_a_wheel_that_was_cut_off_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny, tmp_path / NAME)
    (tmp_path / NAME).write_bytes(tiny.read_bytes()[:-40])
    with pytest.raises(PluginIndexError, match="cannot be read"):
        read_wheel(tmp_path / NAME)
