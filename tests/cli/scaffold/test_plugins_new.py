"""`plugins new`: what it writes is in order unchanged, and it says what it cannot write."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from skyrl_engine.registry.kinds import KINDS

WRITTEN = [kind.name for kind in KINDS.values() if kind.scaffold is not None]
ROOT = Path(__file__).parents[3]


def run(*arguments: str, folder: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def distribution_folder(command, tmp_path, request):
    """The folder of a new distribution of the parametrised kind."""
    outcome = command("plugins", "new", request.param, "my-thing", "--author", 'Jo "J" Doe')
    assert outcome.code == 0, outcome.err
    folder = tmp_path / f"my-thing-{request.param.replace('_', '-')}"
    listed = {tmp_path / line for line in outcome.out.split("\n\n")[0].splitlines()}
    assert listed == {path for path in folder.rglob("*") if path.is_file()}
    return folder


def test_every_kind_is_written_or_refused_with_a_reason(command):
    assert set(KINDS) - set(WRITTEN) == {"backend"}
    outcome = command("plugins", "new", "backend", "mine")
    assert outcome.code == 2
    assert "there is no template for a backend: it holds a model" in outcome.last_line
    outcome = command("plugins", "new", "reward", "mine")
    assert outcome.code == 2
    assert "A reward is a plugin of the kind environment" in outcome.last_line


@pytest.mark.parametrize("distribution_folder", WRITTEN, indirect=True)
def test_it_is_a_distribution_in_good_order(distribution_folder):
    kind = distribution_folder.name.removeprefix("my-thing-").replace("-", "_")
    project = tomllib.loads((distribution_folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == distribution_folder.name
    assert project["authors"] == [{"name": 'Jo "J" Doe'}]
    assert project["dependencies"] == ["skyrl-engine>=0.3,<0.4"]
    assert project["entry-points"] == {f"skyrl_engine.{kind}": {"my_thing": f"my_thing_{kind}.plugin:my_thing"}}
    assert (distribution_folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (distribution_folder / "src" / f"my_thing_{kind}" / "py.typed").exists()
    texts = [path.read_text() for path in distribution_folder.rglob("*") if path.is_file()]
    assert f"Its {kind.replace('_', ' ')} is called `my_thing`." in (distribution_folder / "README.md").read_text()
    assert not [text for text in texts if "${" in text]
    run("ruff", "check", ".", folder=distribution_folder)
    run("ruff", "format", "--check", ".", folder=distribution_folder)
    in_repository = (
        "I001,INP001,PLC0415,S101,S311"  # other first parties, no tests/ of ours, imports where needed, no secrets drawn
    )
    run("ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--ignore", in_repository, ".", folder=distribution_folder)


@pytest.mark.nightly
def test_all_are_typed(command, tmp_path):
    """Strictly, as their own settings ask. That they install, are listed, verified, pass their own tests and train: tests/outsider."""
    folders = []
    for kind in WRITTEN:
        assert command("plugins", "new", kind, f"my-{kind}-thing", "--directory", kind).code == 0
        folders.append(tmp_path / kind)
    (settings,) = {str(tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["mypy"]) for folder in folders}
    assert "'strict': True" in settings
    # One run for all kinds: most of the time goes into the types of what they import.
    sources = [str(folder / part) for folder in folders for part in ("src", "tests")]
    paths = ":".join(str(folder / "src") for folder in folders)
    cache = ("--cache-dir", str(ROOT / ".cache" / "mypy-of-scaffolds"))
    environment = {**os.environ, "MYPYPATH": paths}
    run("mypy", "--config-file", str(folders[0] / "pyproject.toml"), *cache, *sources, folder=tmp_path, env=environment)


def test_names_follow_from_the_one_that_is_given(command, tmp_path):
    assert command("plugins", "new", "loss", "calm_loss", "--license", "MIT", "--author", "Jo").code == 0
    assert (tmp_path / "calm-loss" / "src" / "calm_loss" / "plugin.py").exists()
    assert "Copyright (c) Jo" in (tmp_path / "calm-loss" / "LICENSE").read_text()
    assert command("plugins", "new", "loss", "calm-losses").code == 0
    assert (tmp_path / "calm-losses" / "src" / "calm_losses" / "plugin.py").exists(), "not calm-losses-loss"
    assert command("plugins", "new", "reducer", "calm_reducers").code == 0
    assert (tmp_path / "calm-reducers" / "src" / "calm_reducers" / "plugin.py").exists()
    assert command("plugins", "new", "loss", "calm", "--distribution", "acme-losses", "--directory", "deep/er").code == 0
    assert 'calm = "acme_losses.plugin:calm"' in (tmp_path / "deep" / "er" / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("los", "mine"), "Did you mean 'loss'?"),
        (("loss", "Mine"), "'Mine' is no name for a plugin"),
        (("loss", "1st"), "is no name for a plugin"),
        (("loss", "my__loss"), "is no name for a plugin"),
        (("loss", "lambda"), "already means something"),
        (("reducer", "sum"), "already means something"),
        (("loss", "define"), "already means something"),
        (("loss", "cross-entropy"), "skyrl-engine-losses already offers a loss called 'cross_entropy'"),
        (("loss", "mine", "--distribution", "Acme"), "is no name for a distribution"),
        (("loss", "mine", "--distribution", "pytest"), "a distribution called 'pytest' is installed"),
        (("loss", "mine", "--distribution", "json"), "there is a Python package called 'json'"),
        (("loss", "mine", "--license", "GPL"), "There is no text for the license 'GPL'"),
        (("loss", "mine", "--directory", "there"), "there already exists"),
        (("loss", "mine", "--directory", "file/below"), "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(command, tmp_path, arguments, message):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    outcome = command("plugins", "new", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert {path.name for path in tmp_path.rglob("*")} == {"there", "file"}
