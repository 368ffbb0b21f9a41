"""`plugins search`, `install` and `index` as commands: what they print, their exit codes, and how an index is named."""

import json
from pathlib import Path

import pytest
from small_wheels import build_wheel, index_of


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheels") / "tiny")


@pytest.fixture
def index(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SKYRL_ENGINE_INDEX", raising=False)
    (tmp_path / "index.json").write_text(index_of(wheel).to_json())
    return tmp_path / "index.json"


@pytest.mark.parametrize("word", ["TINY", "reducer:", "acme", "of <b>"])
def test_search_looks_at_names_kinds_and_summaries(command, index, word) -> None:
    outcome = command("plugins", "search", word, "--index", index)
    assert outcome.code == 0, outcome.err
    header, row = outcome.out.splitlines()
    assert header.split()[0] == "distribution"
    assert row.split()[:2] == ["acme-tiny", "0.1.0"]
    assert "verified 2026-01-31" in row
    assert "reducer:acme_tiny" in row


def test_search_as_json_and_without_a_match(command, index, monkeypatch) -> None:
    monkeypatch.setenv("SKYRL_ENGINE_INDEX", str(index))
    (found,) = json.loads(command("plugins", "search", "tiny", "--json").out)
    assert (found["name"], found["wheels"][0]["standing"]) == ("acme-tiny", "verified")
    assert json.loads(command("plugins", "search", "zzz", "--json").out) == []
    assert "None of the 1 distributions" in command("plugins", "search", "zzz").out


@pytest.mark.parametrize("name", ["search", "install"])
def test_no_index_is_the_default(command, index, name) -> None:
    outcome = command("plugins", name, "acme-tiny")
    assert outcome.code == 2
    assert "--index FILE|URL, or the environment variable SKYRL_ENGINE_INDEX" in outcome.last_line


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("install", "acme-tyny"), 3, "Did you mean 'acme-tiny'?"),
        (("install", "acme-tiny"), 3, "acme_tiny-0.1.0-py3-none-any.whl cannot be read: No such file"),
        (("search", "x", "--index", "http://acme.example/index.json"), 3, "Use https, a file, or http on this machine"),
        (("index", "."), 2, "has no wheels"),
        (("index", ".", "--again", "--list-only"), 2, "Leave one of them out"),
        (("index", "nowhere"), 2, "does not exist"),
    ],
)
def test_a_refusal_is_one_line(command, index, monkeypatch, arguments, code, words) -> None:
    monkeypatch.setenv("SKYRL_ENGINE_INDEX", str(index))
    outcome = command("plugins", *arguments)
    assert outcome.code == code
    assert words in outcome.last_line
    assert outcome.out == ""


@pytest.mark.parametrize("text", ["x", "[other]\n", '[options]\n"a:b" = "x=1"\n', "[extras]\na = [1]\n", "options = 3\n"])
def test_options_of_another_form_are_refused(command, index, wheel, tmp_path, text) -> None:
    (tmp_path / "options.toml").write_text(text)
    (tmp_path / wheel.name).write_bytes(wheel.read_bytes())
    outcome = command("plugins", "index", ".", "--options", "options.toml")
    assert outcome.code == 2
    assert "options.toml: " in outcome.last_line
    assert not (tmp_path / "catalogue.md").exists()


def test_index_says_what_it_made(command, index, wheel, tmp_path, monkeypatch) -> None:
    (tmp_path / wheel.name).write_bytes(wheel.read_bytes())
    # tried before: what trying does is in tests/catalogue
    (tmp_path / "out").mkdir()
    index.rename(tmp_path / "out" / "index.json")
    outcome = command("plugins", "index", ".", "--output", "out")
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip() == "out/index.json: 1 verified."


def test_index_ends_with_code_3_where_a_wheel_is_no_wheel(command, index, wheel, tmp_path) -> None:
    (tmp_path / wheel.name).write_bytes(wheel.read_bytes())
    (tmp_path / "odd.whl").write_bytes(b"x")
    outcome = command("plugins", "index", ".")
    assert outcome.code == 3
    assert outcome.out.strip() == "index.json: 1 verified, 1 unreadable."
    assert "odd.whl is no name of a wheel" in outcome.err
    assert command("plugins", "index", ".", "--quiet").err.count("\n") == 1
    assert json.loads(command("plugins", "index", ".", "--json").out) == json.loads((tmp_path / "index.json").read_text())
