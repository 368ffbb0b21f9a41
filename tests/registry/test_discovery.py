"""Discovery reads metadata: it imports nothing, forgives what is damaged, and sees one distribution once."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from skyrl_engine.registry.discovery import discover, normalise


def list_records(distribution: str) -> list[tuple[str, str, str | None]]:
    return [(record.kind, record.name, record.version) for record in discover().records if record.distribution == distribution]


def test_every_kind_is_found_with_name_version_target_and_range(install) -> None:
    points = {
        kind: {f"my_{kind}": f"acme.plugin:{kind}"} for kind in ("collator", "loss", "reducer", "backend", "merger", "observer")
    }
    install("acme-parts", "2.1.0", entry_points=points, requires=["skyrl-engine[testing]>=0.1,<0.2", "numpy"])
    records = [record for record in discover().records if record.distribution == "acme-parts"]
    assert [(record.kind, record.name, record.target) for record in records] == [
        (kind, f"my_{kind}", f"acme.plugin:{kind}") for kind in ("collator", "loss", "reducer", "backend", "merger", "observer")
    ]
    assert {(record.version, record.source, record.engine_requirement) for record in records} == {
        ("2.1.0", "distribution", "<0.2,>=0.1")
    }


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        ([], None),
        (["skyrl-engine"], None),
        (["skyrl_engine==0.1.*"], "==0.1.*"),
        (["skyrl-engine-losses>=7", "SkyRL.Engine >= 0.1"], ">=0.1"),
        (["SKYRL_engine>=0.1.2,!=0.1.5,<1"], "!=0.1.5,<1,>=0.1.2"),
        (["skyrl-engine>=0.1,"], ">=0.1"),
        (["skyrl-engine>=0.1,,<2"], None),
        (["skyrl-engine>=0.1<2"], None),
        (["skyrl-engine===0.1", "skyrl-engine<9"], "===0.1"),
        (["skyrl-engine>=1.0rc1,<2"], "<2,>=1.0rc1"),
        (["skyrl-engine>=9; extra == 'dev'"], None),
        (["skyrl-engine (((("], None),
    ],
)
def test_the_range_of_engine_versions_is_read_from_the_requirements(install, requires: list[str], expected: str | None) -> None:
    install("acme-parts", entry_points={"loss": {"x": "acme:x"}}, requires=requires)
    assert [record.engine_requirement for record in discover().records if record.distribution == "acme-parts"] == [expected]


@pytest.mark.parametrize("spelling", ["Acme.Losses", "acme_losses", "ACME--losses", "acme-losses"])
def test_names_of_distributions_are_normalised(install, spelling: str) -> None:
    install(spelling, entry_points={"loss": {"x": "acme:x"}})
    assert list_records("acme-losses") == [("loss", "x", "1.0.0")]
    assert normalise(spelling) == "acme-losses"


def test_unknown_groups_and_other_peoples_groups_are_none_of_ours(install) -> None:
    install("acme-parts", entry_points={"flavour": {"x": "acme:x"}})
    assert list_records("acme-parts") == []


def test_one_object_under_two_names_is_two_plugins(install) -> None:
    install("acme-parts", entry_points={"loss": {"nll": "acme:x", "cross": "acme:x"}})
    assert list_records("acme-parts") == [("loss", "cross", "1.0.0"), ("loss", "nll", "1.0.0")]


def test_a_left_over_in_the_same_folder_is_not_a_second_distribution(install) -> None:
    install("acme-parts", "1.0.0", entry_points={"loss": {"x": "acme:x"}})
    install("acme-parts", "1.1.0", entry_points={"loss": {"x": "acme:x"}})
    assert list_records("acme-parts") == [("loss", "x", metadata.version("acme-parts"))]


@pytest.mark.parametrize("spelling", ["acme-parts", "Acme_Parts"])
def test_of_two_installations_the_first_on_the_path_counts(
    install_into, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    install_into(tmp_path / "late", "acme-parts", "1.0.0", entry_points={"loss": {"old": "acme:x", "both": "acme:x"}})
    install_into(tmp_path / "early", spelling, "2.0.0", entry_points={"loss": {"both": "acme:x"}})
    monkeypatch.syspath_prepend(tmp_path / "late")
    monkeypatch.syspath_prepend(tmp_path / "early")
    assert list_records("acme-parts") == [("loss", "both", "2.0.0")]


def test_a_first_installation_without_plugins_hides_a_later_one_with_some(
    install_into, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_into(tmp_path / "late", "acme-parts", "1.0.0", entry_points={"loss": {"gone": "acme:x"}})
    install_into(tmp_path / "early", "acme-parts", "2.0.0", entry_points={})
    monkeypatch.syspath_prepend(tmp_path / "late")
    monkeypatch.syspath_prepend(tmp_path / "early")
    assert list_records("acme-parts") == []


def remove_metadata(information: Path) -> None:
    (information / "METADATA").unlink()


def scramble_metadata(information: Path) -> None:
    (information / "METADATA").write_bytes(b"Name: \xff\xfe\n")


def empty_metadata(information: Path) -> None:
    (information / "METADATA").write_text("")


def forget_version(information: Path) -> None:
    (information / "METADATA").write_text("Metadata-Version: 2.4\nName: acme-broken\n")


def scramble_entry_points(information: Path) -> None:
    (information / "entry_points.txt").write_bytes(b"[skyrl_engine.loss]\nx = \xff\xfe:y\n")


def break_entry_points(information: Path) -> None:
    (information / "entry_points.txt").write_text("[skyrl_engine.loss]\nno equals sign\n")


@pytest.mark.parametrize(
    "damage", [remove_metadata, scramble_metadata, empty_metadata, forget_version, scramble_entry_points, break_entry_points]
)
def test_damaged_metadata_hides_nobody_else_and_is_reported(install, damage) -> None:
    damage(install("acme-broken", entry_points={"loss": {"x": "acme:x"}}))
    install("acme-parts", entry_points={"loss": {"x": "acme:x"}})
    assert list_records("acme-parts") == [("loss", "x", "1.0.0")]
    assert list_records("acme-broken") == []
    (unreadable,) = discover().unreadable
    assert "acme" in str(unreadable) or "site" in str(unreadable)


def test_first_party_plugins_are_found_like_anybodys() -> None:
    names = {record.reference for record in discover().records}
    assert {"skyrl-engine:metrics_jsonl", "skyrl-engine-losses:cross_entropy", "skyrl-engine-fsdp:fsdp"} <= names


def test_listing_and_resolving_import_no_plugin_and_nothing_heavy() -> None:
    code = """
import sys
from skyrl_engine.errors import PluginNotFoundError
from skyrl_engine.registry.resolve import Registry
registry = Registry.discover()
plugins = {record.target.partition(":")[0] for record in registry.records()}
registry.resolve("loss", "cross_entropy")
try:
    registry.resolve("loss", "cross_entropi")
except PluginNotFoundError:
    pass
else:
    raise AssertionError("a misspelt name was resolved")
heavy = {"numpy", "torch", "ray", "transformers", "cattrs", "rich", "pluggy", "datasets"} | plugins
assert len(plugins) > 3
print(sorted(heavy & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
