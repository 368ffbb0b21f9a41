"""Trainers of other distributions: chosen by name, imported when chosen, and refused by name where they are broken."""

import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.config import load, resolve
from skyrl_engine.config.structure import structure
from skyrl_engine.config.trainers import get_trainer
from skyrl_engine.errors import ConfigError, PluginAmbiguousError, PluginBrokenError, PluginIncompatibleError

KINDS = ("collator", "loss", "reducer", "backend", "merger")
MODULE = f"""
from skyrl_engine.config.trainers import Trainer

def run(resolved, *, observers, progress):
    return f"trained {{resolved.config.model.path}}"

TRAINER = Trainer("looped", ("data", "checkpoint"), {KINDS!r}, f"{{__name__}}:run", f"{{__name__}}:run")
STRAY = Trainer("stray", ("data", "tables"), ("lose",), "a:b", "a:b")
NUMBER = 3
"""


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`offers(distribution, name=target, ...)` installs a distribution with these trainers, and returns the name of their module."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(distribution: str, *, requires: str = "skyrl-engine>=0.3,<0.4", **trainers: str) -> str:
        module = distribution.replace("-", "_")
        information = tmp_path / f"{module}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {distribution}\nVersion: 1.0\nRequires-Dist: {requires}\n"
        )
        points = "\n".join(f"{name} = {module}:{target}" for name, target in trainers.items())
        (information / "entry_points.txt").write_text(f"[skyrl_engine.trainer]\n{points}\n")
        (tmp_path / f"{module}.py").write_text(MODULE)
        return module

    yield install
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def test_it_is_chosen_by_name_with_its_tables_and_kinds_and_runs(offers) -> None:
    module = offers("acme-loops", looped="TRAINER")
    assert structure(load(None, ["model.path=m", "data.train=d"])).problems == ()
    assert module not in sys.modules, "another trainer's run imports nothing of it"
    resolved = resolve(load(None, ["trainer=looped", "model.path=m", "data.train=d"]))
    assert set(resolved.plugins) == set(KINDS)
    assert get_trainer("looped").load_run()(resolved, observers=[], progress=None) == "trained m"
    (problem,) = structure(load(None, ["trainer=looped", "model.path=m", "data.train=d", "rl.steps=3"])).problems
    assert "[rl] is a table of trainer rl, and this run's trainer is looped" in str(problem)


def test_a_misspelt_one_is_found_without_importing_it(offers) -> None:
    module = offers("acme-loops", looped="TRAINER")
    (problem,) = structure(load(None, ["trainer=loopde"])).problems
    assert str(problem) == 'command line: trainer: there is no trainer "loopde". Did you mean "looped"?'
    with pytest.raises(ConfigError, match="looped"):
        get_trainer("loopde")
    assert module not in sys.modules


def test_one_called_like_the_engines_own_does_not_replace_it(offers) -> None:
    module = offers("acme-loops", sft="TRAINER")
    assert get_trainer("sft").run == "skyrl_engine.training.sft.trainer:run_sft"
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("name", "target", "cause"),
    [
        ("number", "NUMBER", "is a int and no Trainer"),
        ("other", "TRAINER", "calls itself 'looped'"),
        ("stray", "STRAY", r"uses \[tables\], lose"),
        ("absent", "NOTHING", "its import"),
    ],
)
def test_a_broken_one_is_refused_by_name(offers, name: str, target: str, cause: str) -> None:
    offers("acme-loops", **{name: target})
    with pytest.raises(PluginBrokenError, match=cause):
        get_trainer(name)


def test_one_for_another_engine_and_one_of_two_distributions_are_refused(offers) -> None:
    module = offers("acme-old", requires="skyrl-engine<0.3", old="TRAINER")
    with pytest.raises(PluginIncompatibleError):
        get_trainer("old")
    offers("acme-first", looped="TRAINER")
    offers("acme-second", looped="TRAINER")
    with pytest.raises(PluginAmbiguousError, match="offered by 2 distributions"):
        get_trainer("looped")
    assert module not in sys.modules
