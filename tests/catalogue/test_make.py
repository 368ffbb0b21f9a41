"""A catalogue of a folder: each wheel is tried once, a kill loses nothing, and pages and badges show what strangers wrote as text."""

import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from small_wheels import build_wheel, index_of

from skyrl_engine.catalogue import make
from skyrl_engine.catalogue.badge import draw_badge
from skyrl_engine.catalogue.make import make_catalogue
from skyrl_engine.catalogue.pages import write_catalogue_page, write_distribution_page
from skyrl_engine.catalogue.plugin_index import IndexedPlugin, IndexedWheel, PluginIndex, read_index
from skyrl_engine.catalogue.trial import TrialSettings
from skyrl_engine.catalogue.wheel_facts import WheelFacts
from skyrl_engine.errors import PluginIndexError

NASTY = "a](javascript:x) <script>alert(1)</script> | `b` \x1b[2J\n# c"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the wheels that were tried; none is installed."""
    names: list[str] = []

    def try_wheel(wheel: Path, facts: WheelFacts, settings: TrialSettings, tell: Callable[[str], None]) -> IndexedWheel:
        if facts.name == "acme-killer" and names:
            raise KeyboardInterrupt
        names.append(facts.name)
        assert wheel.parent == settings.wheels
        tell("reducer:acme_tiny kept, 1 s")
        return index_of(wheel).distributions[0].newest

    monkeypatch.setattr(make, "try_wheel", try_wheel)
    return names


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheels") / "other", "acme-killer")


@pytest.fixture
def wheels(tiny: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    shutil.copy(tiny, folder)
    return folder


def read(folder: Path) -> PluginIndex:
    return read_index((folder / "index.json").read_bytes(), "here")


def test_a_catalogue_is_a_folder_from_which_can_be_installed(wheels: Path, tmp_path: Path, tried: list[str]) -> None:
    lines: list[str] = []
    made = make_catalogue(TrialSettings(wheels), tmp_path / "out", tell=lines.append)
    assert made.index == read(tmp_path / "out")
    assert {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()} == {
        "index.json",
        "catalogue.md",
        "catalogue/acme-tiny.md",
        "catalogue/acme-tiny.svg",
        "acme_tiny-0.1.0-py3-none-any.whl",
    }
    assert lines == ["[1/1] acme-tiny 0.1.0: installing", "[1/1] acme-tiny 0.1.0: reducer:acme_tiny kept, 1 s"]
    assert [path.name for path in wheels.iterdir()] == ["acme_tiny-0.1.0-py3-none-any.whl"]


def test_only_wheels_with_a_new_hash_are_tried_again(wheels: Path, tried: list[str], tmp_path: Path) -> None:
    for again, times in ((False, 1), (False, 1), (True, 2)):
        make_catalogue(TrialSettings(wheels), wheels, again=again)
        assert tried == ["acme-tiny"] * times
    shutil.copy(build_wheel(tmp_path / "changed", code="CHANGED = 1"), wheels)
    make_catalogue(TrialSettings(wheels), wheels)
    assert len(tried) == 3
    assert len(read(wheels).distributions[0].wheels) == 1


def test_a_wheel_that_was_tried_with_another_engine_is_tried_again(wheels: Path, tried: list[str]) -> None:
    make_catalogue(TrialSettings(wheels), wheels)
    text = (wheels / "index.json").read_text()
    (wheels / "index.json").write_text(text.replace('"engine": "0.3.0"', '"engine": "0.2.9"'))
    make_catalogue(TrialSettings(wheels), wheels)
    assert len(tried) == 2


def test_a_wheel_that_was_only_listed_is_tried_later(wheels: Path, other: Path, tried: list[str]) -> None:
    make_catalogue(TrialSettings(wheels), wheels)
    shutil.copy(other, wheels)
    made = make_catalogue(TrialSettings(wheels), wheels, list_only=True).index
    assert tried == ["acme-tiny"]
    assert {each.name: each.newest.standing for each in made.distributions} == {
        "acme-tiny": "verified",
        "acme-killer": "not verified",
    }
    assert list(made.distributions[0].newest.list_reasons()) == ["reducer:acme_tiny is unchecked: it was not tried"]
    pages = {name: (wheels / "catalogue" / f"acme-{name}.md").read_text() for name in ("killer", "tiny")}
    assert "and not tried." in pages["killer"]
    assert "Tried on" in pages["tiny"]
    tried.clear()
    make_catalogue(TrialSettings(wheels), wheels)
    assert tried == ["acme-killer"]


def test_a_kill_loses_nothing_that_was_tried(wheels: Path, other: Path, tiny: Path, tried: list[str]) -> None:
    make_catalogue(TrialSettings(wheels), wheels)
    shutil.copy(other, wheels)
    with pytest.raises(KeyboardInterrupt):
        make_catalogue(TrialSettings(wheels), wheels)
    assert read(wheels).find("acme-tiny") is not None
    tried.clear()
    make_catalogue(TrialSettings(wheels), wheels)
    assert tried == ["acme-killer"]
    assert not list(wheels.glob(".*"))


def test_two_at_once_in_one_folder_do_not_overwrite_each_other(wheels: Path, tried: list[str]) -> None:
    def make_another(_line: str) -> None:
        with pytest.raises(PluginIndexError, match="another process makes a catalogue in"):
            make_catalogue(TrialSettings(wheels), wheels)

    make_catalogue(TrialSettings(wheels), wheels, tell=make_another)
    make_catalogue(TrialSettings(wheels), wheels)
    assert tried == ["acme-tiny"]


def test_files_that_are_no_wheels_stop_nothing(wheels: Path, tried: list[str]) -> None:
    (wheels / "acme_zip-0.1.0-py3-none-any.whl").write_bytes(b"no zip")
    (wheels / "odd.whl").write_bytes(b"")
    (wheels / "acme_gone-0.1.0-py3-none-any.whl").symlink_to("nowhere")
    (wheels / "acme_folder-0.1.0-py3-none-any.whl").mkdir()
    (wheels / "index.json").write_text("<html>")
    lines: list[str] = []
    made = make_catalogue(TrialSettings(wheels), wheels, tell=lines.append)
    assert len(made.refused) == 4
    assert [distribution.name for distribution in read(wheels).distributions] == ["acme-tiny"]
    assert "is a page of HTML" in lines[0]


def test_what_is_no_longer_there_loses_its_badge(wheels: Path, other: Path, tried: list[str]) -> None:
    shutil.copy(other, wheels)
    make_catalogue(TrialSettings(wheels), wheels)
    (wheels / other.name).unlink()
    make_catalogue(TrialSettings(wheels), wheels)
    assert sorted(path.name for path in (wheels / "catalogue").iterdir()) == ["acme-tiny.md", "acme-tiny.svg"]


def test_pages_show_what_strangers_wrote_as_text(tiny: Path) -> None:
    plugin = IndexedPlugin("reducer", "<b>|x", "broken", 3, ("<i>",), NASTY, (NASTY,))
    index = index_of(tiny, summary=NASTY, license=NASTY, problem=NASTY, plugins=(plugin,))
    for page in (write_catalogue_page(index), write_distribution_page(index.distributions[0])):
        assert "<script" not in page.replace("\\<script", "")
        assert "](javascript" not in page.replace("\\](javascript", "").replace("\\]\\(javascript", "")
        assert "\x1b" not in page
        assert not [line for line in page.splitlines() if line.startswith("# c")]
        widths = {line.replace("\\|", "").count("|") for line in page.splitlines() if line.startswith("| ") and "`" not in line[:3]}
        assert len(widths) == 1, page


@pytest.mark.parametrize("status", ["kept", "broken", "unchecked"])
def test_a_badge_is_an_image_with_words_for_those_who_do_not_see_it(tiny: Path, status: str) -> None:
    plugins = (IndexedPlugin("reducer", "acme_tiny", status),)  # type: ignore[arg-type]
    (distribution,) = index_of(tiny, plugins=plugins).distributions
    badge = ET.fromstring(draw_badge(distribution))
    title = badge.findtext("{http://www.w3.org/2000/svg}title")
    assert title == f"acme-tiny 0.1.0: {distribution.newest.standing} with skyrl-engine 0.3.0 on 2026-01-31"
    assert badge.get("role") == "img"
    assert badge.get("aria-label") == title
    assert distribution.newest.standing in "".join(badge.itertext())
