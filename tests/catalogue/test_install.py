"""A wheel is chosen by what is here, compared with what was verified, and installed by pip, or refused before that."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_wheels import KEPT, build_wheel, index_of

from skyrl_engine.catalogue import install
from skyrl_engine.catalogue.install import choose_wheel, install_wheel, open_index
from skyrl_engine.catalogue.pip import plain_environment
from skyrl_engine.catalogue.plugin_index import IndexedDistribution, IndexedPlugin, PluginIndex
from skyrl_engine.catalogue.trial import make_environment
from skyrl_engine.errors import PluginError, PluginIncompatibleError, PluginIndexError, PluginNotFoundError

Catalogue = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_pip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Calls of pip in this process, which must not change the environment of the tests."""
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(install, "pip_install", lambda *arguments: calls.append(arguments) or ["not in tests"])
    return calls


def try_to_install(index: Path, requested: str = "acme-tiny", *, unverified: bool = False) -> None:
    place, found = open_index(str(index))
    install_wheel(place, choose_wheel(found, requested, unverified=unverified))


def test_a_wheel_as_it_was_verified_comes_to_pip_with_this_engine(catalogue: Catalogue, no_pip: list[tuple[object, ...]]) -> None:
    with pytest.raises(PluginIndexError, match=r"pip cannot install acme-tiny 0\.1\.0: not in tests"):
        try_to_install(catalogue())
    ((file, engine),) = no_pip
    assert Path(str(file)).name == "acme_tiny-0.1.0-py3-none-any.whl"
    assert str(engine).startswith("skyrl-engine==")


def flip_a_byte(wheel: Path) -> None:
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)


def add_a_byte(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"x")


def replace_by_html(wheel: Path) -> None:
    wheel.write_bytes(b"<html>".ljust(wheel.stat().st_size))


def take_away(wheel: Path) -> None:
    wheel.unlink()


@pytest.mark.parametrize("plant", [flip_a_byte, add_a_byte, replace_by_html, take_away])
def test_a_planted_wheel_is_refused(catalogue: Catalogue, no_pip: list[tuple[object, ...]], plant: Callable[[Path], None]) -> None:
    index = catalogue()
    plant(next(index.parent.glob("*.whl")))
    with pytest.raises(PluginIndexError) as caught:
        try_to_install(index)
    assert caught.value.exit_code == PluginError.exit_code
    assert no_pip == []


def test_a_changed_wheel_of_the_same_size_and_form_is_refused_by_its_hash(catalogue: Catalogue, tmp_path: Path) -> None:
    index = catalogue()
    (wheel,) = index.parent.glob("*.whl")
    other = build_wheel(tmp_path / "other", code=KEPT.replace("sum", "eum"))
    shutil.copy(other, wheel)
    table = json.loads(index.read_text())
    table["distributions"][0]["wheels"][0]["size"] = other.stat().st_size
    index.write_text(json.dumps(table))
    with pytest.raises(PluginIndexError, match="is not the file that was verified: its SHA-256 is"):
        try_to_install(index)


def test_a_wheel_of_another_name_is_refused(catalogue: Catalogue, no_pip: list[tuple[object, ...]], tmp_path: Path) -> None:
    """Its hash is that of the index, and only its metadata says who it is."""
    index = catalogue()
    (wheel,) = index.parent.glob("*.whl")
    shutil.copy(build_wheel(tmp_path / "other", name="acme-evil"), wheel)
    table = json.loads(index.read_text())
    entry = table["distributions"][0]["wheels"][0]
    entry["size"], entry["sha256"] = wheel.stat().st_size, hashlib.sha256(wheel.read_bytes()).hexdigest()
    index.write_text(json.dumps(table))
    with pytest.raises(PluginIndexError, match=r"holds acme-evil 0\.1\.0, which its name does not say"):
        try_to_install(index)
    assert no_pip == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requires_engine": ">=0.3"}, "range of engines"),
        ({"requires_python": ""}, "range of Pythons"),
        ({"plugins": (IndexedPlugin("loss", "acme_tiny", "kept", 20),)}, "the plugins of"),
        ({"plugins": (IndexedPlugin("reducer", "acme_tiny", "kept"), IndexedPlugin("loss", "more", "kept"))}, "the plugins of"),
    ],
)
def test_a_wheel_that_says_otherwise_than_the_index_is_refused(
    catalogue: Catalogue, no_pip: list[tuple[object, ...]], changes: dict[str, object], words: str
) -> None:
    with pytest.raises(PluginIndexError, match=words):
        try_to_install(catalogue(**changes))
    assert no_pip == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requires_engine": "<0.2"}, r"is made for skyrl-engine <0\.2, and this is"),
        ({"requires_python": "<3"}, "is made for Python <3"),
    ],
)
def test_what_is_not_for_what_is_here_is_refused_before_it_is_read(
    catalogue: Catalogue, no_pip: list[tuple[object, ...]], changes: dict[str, object], words: str
) -> None:
    index = catalogue(**changes)
    next(index.parent.glob("*.whl")).unlink()
    with pytest.raises(PluginIncompatibleError, match=words):
        try_to_install(index, unverified=True)
    assert no_pip == []


def test_a_wheel_for_another_machine_is_refused(tiny: Path) -> None:
    index = index_of(tiny, file="acme_tiny-0.1.0-cp311-cp311-win_arm64.whl")
    with pytest.raises(PluginIncompatibleError, match="made for other machines"):
        choose_wheel(index, "acme-tiny")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"plugins": (IndexedPlugin("reducer", "acme_tiny", "broken", 3, ("padding",), "it pads"),)},
            "reducer:acme_tiny is broken: it pads",
        ),
        ({"plugins": (IndexedPlugin("reducer", "acme_tiny", "unchecked", reason="it needs x"),)}, "is unchecked: it needs x"),
        ({"problem": "what it requires cannot be installed"}, "what it requires cannot be installed"),
    ],
)
def test_what_is_not_verified_wants_a_word(
    catalogue: Catalogue, no_pip: list[tuple[object, ...]], changes: dict[str, object], words: str
) -> None:
    index = catalogue(**changes)
    with pytest.raises(PluginIndexError, match="Add --unverified") as caught:
        try_to_install(index)
    assert words in str(caught.value)
    assert no_pip == []
    with pytest.raises(PluginIndexError, match="not in tests"):
        try_to_install(index, unverified=True)
    assert len(no_pip) == 1


def test_the_newest_wheel_that_fits_is_chosen_and_an_older_verified_one_named(tiny: Path) -> None:
    def of(version: str, **changes: object) -> object:
        return index_of(tiny, version=version, file=f"acme_tiny-{version}-py3-none-any.whl", **changes).distributions[0].newest

    wheels = [
        of("0.4.0", requires_engine=">=9"),
        of("0.3.0", plugins=()),
        of("0.2.0"),
        of("0.10.0", requires_python="<3"),
        of("0.1.0"),
    ]
    index = PluginIndex((IndexedDistribution("acme-tiny", tuple(wheels)),))
    with pytest.raises(PluginIndexError, match=r"0\.3\.0 is not verified.*Install acme-tiny==0\.2\.0"):
        choose_wheel(index, "acme-tiny")
    assert choose_wheel(index, "Acme_Tiny", unverified=True).wheel.version == "0.3.0"
    assert choose_wheel(index, "acme-tiny==0.2").wheel.version == "0.2.0"
    for text in ("acme-tiny==7", "acme-tiny==x"):
        with pytest.raises(PluginNotFoundError, match="is not in the index"):
            choose_wheel(index, text)


@pytest.mark.parametrize(
    ("name", "words"),
    [("acme-tyny", "Did you mean 'acme-tiny'?"), ("acme_tiny_", "Did you mean"), ("zzz", "plugins search"), ("", "plugins search")],
)
def test_a_name_that_is_not_there_gets_a_hint(tiny: Path, name: str, words: str) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        choose_wheel(index_of(tiny), name)
    assert words in str(caught.value)


def test_the_name_of_a_plugin_leads_to_its_distribution(tiny: Path) -> None:
    plugins = (IndexedPlugin("reducer", "small", "kept"),)
    with pytest.raises(PluginNotFoundError, match="offered by acme-tiny: install that"):
        choose_wheel(index_of(tiny, plugins=plugins), "small")


def test_the_engine_itself_is_not_installed(tmp_path: Path) -> None:
    engine = index_of(build_wheel(tmp_path / "engine", name="skyrl-engine", engine=">=0"))
    with pytest.raises(PluginIndexError, match="the engine that runs this command"):
        choose_wheel(engine, "skyrl-engine")


@pytest.mark.nightly
def test_an_environment_gets_the_plugin_and_a_changed_one_of_the_same_version_replaces_it(tmp_path: Path, tiny: Path) -> None:
    """The whole command, in an environment of its own, without a network."""
    python = make_environment(tmp_path / "environment")
    environment = {**plain_environment(), "PIP_NO_INDEX": "1"}

    def engine(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [str(python), "-P", "-m", "skyrl_engine", "plugins", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)

    other = build_wheel(tmp_path / "other", code=KEPT + "\nOTHER = 1\n")
    for wheel in (tiny, other):
        shutil.copy(wheel, tmp_path)
        (tmp_path / "index.json").write_text(index_of(wheel).to_json())
        done = engine("install", "acme-tiny", "--index", "index.json")
        assert done.returncode == 0, done.stderr
        assert "It offers the reducer acme_tiny" in done.stdout
        (installed,) = tmp_path.glob("environment/lib/python*/site-packages/acme_tiny/__init__.py")
        assert ("OTHER" in installed.read_text()) == (wheel is other)
    assert "acme-tiny" in engine("list", "--kind", "reducer").stdout
    assert not list(Path(sys.prefix).glob("lib/python*/site-packages/acme_tiny*"))
