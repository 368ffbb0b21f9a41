"""Three ways to mean a plugin, and what is none of them."""

from pathlib import Path

import pytest

from skyrl_engine.errors import PluginNotFoundError
from skyrl_engine.registry.plugin_ref import parse


def test_a_bare_name() -> None:
    reference = parse("ppo")
    assert (reference.name, reference.distribution, reference.path) == ("ppo", None, None)


@pytest.mark.parametrize("text", ["acme-losses:ppo", "Acme_Losses:ppo", " acme.losses:ppo "])
def test_a_qualified_name(text: str) -> None:
    reference = parse(text)
    assert (reference.name, reference.distribution, reference.path) == ("ppo", "acme-losses", None)


@pytest.mark.parametrize("text", ["./my_loss.py:focal", "my_loss.py:focal", "sub/../my_loss.py:focal"])
def test_a_local_file_is_looked_up_from_the_base(tmp_path: Path, text: str) -> None:
    reference = parse(text, base=tmp_path)
    assert (reference.name, reference.distribution, reference.path) == ("focal", None, tmp_path / "my_loss.py")


def test_a_local_file_without_base_is_looked_up_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("./my_loss.py:focal").path == tmp_path / "my_loss.py"


def test_an_absolute_file_needs_no_base(tmp_path: Path) -> None:
    assert parse(f"{tmp_path}/my_loss.py:focal", base=Path("/elsewhere")).path == tmp_path / "my_loss.py"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("~/my_loss.py:focal").path == tmp_path / "my_loss.py"


@pytest.mark.parametrize("text", ["", ":", ":ppo", "acme-losses:", "two words:ppo", "-x:ppo"])
def test_nonsense_is_refused_with_the_three_ways(text: str) -> None:
    with pytest.raises(PluginNotFoundError, match=r"\./file\.py:name"):
        parse(text)


@pytest.mark.parametrize("text", ["./my_loss.py", "my_loss.py", "./my_loss.py:", "sub/my_loss"])
def test_a_file_without_a_name_says_so(text: str) -> None:
    with pytest.raises(PluginNotFoundError, match="names a file but no plugin in it"):
        parse(text)
