"""A process that lasts sees plugins come, go and change, and reads nothing again while none does."""

import shutil

import pytest

from skyrl_engine.registry.discovery import discover
from skyrl_engine.registry.installed import remember_while_unchanged

POINTS = {"loss": {"acme": "acme:plain"}}


def find_versions() -> list[str | None]:
    return [record.version for record in discover().records if record.distribution == "acme-loss"]


def test_nothing_is_read_again_while_nothing_changes(site, install):
    install("acme-loss", entry_points=POINTS)
    assert discover() is discover()


def test_an_installation_an_upgrade_and_a_removal_are_seen(site, install):
    assert find_versions() == []
    first = install("acme-loss", "1.0.0", entry_points=POINTS)
    assert find_versions() == ["1.0.0"]
    shutil.rmtree(first)
    install("acme-loss", "1.1.0", entry_points=POINTS)
    assert find_versions() == ["1.1.0"]
    shutil.rmtree(site / "acme_loss-1.1.0.dist-info")
    assert find_versions() == []


def test_an_installation_that_is_half_written_is_read_again(site, install):
    information = install("acme-loss", entry_points=POINTS)
    points = information / "entry_points.txt"
    text = points.read_text()
    points.unlink()
    assert find_versions() == []
    points.write_text(text)
    assert find_versions() == ["1.0.0"]


def test_metadata_that_is_changed_in_place_is_read_again(site, install):
    information = install("acme-loss", entry_points=POINTS)
    assert find_versions() == ["1.0.0"]
    (information / "METADATA").write_text((information / "METADATA").read_text().replace("1.0.0", "1.0.1"))
    assert find_versions() == ["1.0.1"]


def test_an_error_is_not_remembered(site):
    answers = iter([ValueError("once"), "read"])

    @remember_while_unchanged
    def read() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="once"):
        read()
    assert read() == read() == "read"
