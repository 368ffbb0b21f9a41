"""Trainers of other distributions: found in metadata, imported when chosen, and refused by name where they are wrong."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyrl_engine.config import from_dict, load, resolve
from skyrl_engine.config.find_trainer import find_trainer, list_trainer_names
from skyrl_engine.config.structure import structure
from skyrl_engine.config.trust.seal import digests_of
from skyrl_engine.errors import ContractError, EngineError, PluginAmbiguousError, PluginBrokenError, PluginIncompatibleError

Offers = Callable[..., str]
ROW = """
from attrs import frozen
from skyrl_engine.training import Trainer


@frozen
class Options:
    depth: int


ROW = Trainer("{name}", tables={tables}, kinds={kinds}, run="acme_a.row:run", plan="acme_a.row:plan", options={options})
number = 3
"""


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offers]:
    """Install a distribution that offers a trainer; returns the name of its module."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(
        distribution: str = "acme-a",
        *,
        trainer: str = "deep",
        target: str = "ROW",
        requires: str = "skyrl-engine>=0.3,<0.4",
        name: str | None = None,
        tables: str = "()",
        kinds: str = "('backend', 'loss')",
        options: str = "'acme_a.row:Options'",
    ) -> str:
        package = distribution.replace("-", "_")
        information = site / f"{package}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {distribution}\nVersion: 1.0\nRequires-Dist: {requires}\n"
        )
        (information / "entry_points.txt").write_text(f"[skyrl_engine.trainer]\n{trainer} = {package}.row:{target}\n")
        (site / package).mkdir()
        (site / package / "__init__.py").write_text("")
        text = ROW.format(name=name or trainer, tables=tables, kinds=kinds, options=options)
        (site / package / "row.py").write_text(text)
        return f"{package}.row"

    yield install
    for module in [module for module in sys.modules if module.startswith("acme_")]:
        del sys.modules[module]


def test_it_is_listed_and_not_imported_until_it_is_chosen(offers: Offers) -> None:
    module = offers()
    assert "deep" in list_trainer_names()
    assert structure(load(None, ["model.path=m", "data.train=d"])).problems == ()
    assert module not in sys.modules
    assert find_trainer("deep") is find_trainer("acme-a:deep")
    assert module in sys.modules
    assert find_trainer("deeper") is None


@pytest.mark.parametrize("name", ["deep", "acme-a:deep"])
def test_its_table_is_structured_and_read_back(offers: Offers, name: str) -> None:
    offers()
    resolved = resolve(load(None, [f"trainer={name}", "model.path=m", "deep.depth=3"]))
    assert resolved.config.trainer_options.depth == 3
    assert resolved.as_dict()["deep"] == {"depth": 3}
    again = resolve(from_dict(resolved.as_dict(), "run.json"))
    assert again.as_dict() == resolved.as_dict()
    problems = [str(problem) for problem in structure(load(None, [f"trainer={name}", "model.path=m"])).problems]
    assert ["depth" in problem for problem in problems] == [True]


def test_one_of_two_distributions_is_named_in_full(offers: Offers) -> None:
    offers()
    offers("acme-b")
    assert {"acme-a:deep", "acme-b:deep"} <= set(list_trainer_names())
    with pytest.raises(PluginAmbiguousError, match="Write acme-a:deep or acme-b:deep"):
        find_trainer("deep")


@pytest.mark.parametrize(
    ("trainers", "error", "message"),
    [
        ({"requires": "skyrl-engine<0.1"}, PluginIncompatibleError, "0.1"),
        ({"target": "missing"}, PluginBrokenError, "failed in its import: AttributeError"),
        ({"target": "number"}, ContractError, "is int and no Trainer"),
        ({"name": "other"}, ContractError, "is called 'other' in its row"),
        ({"trainer": "data"}, ContractError, "is called like a table of the configuration"),
        ({"tables": "('dat',)"}, ContractError, "names the tables dat; there are data, training"),
        ({"kinds": "('los',)"}, ContractError, "names the kinds los; there are collator"),
        ({"options": "'acme_a.row:number'"}, ContractError, "is no attrs class"),
    ],
)
def test_a_wrong_one_is_refused_by_name(offers: Offers, trainers: dict[str, str], error: type[EngineError], message: str) -> None:
    offers(**trainers)
    with pytest.raises(error, match=message):
        structure(load(None, [f"trainer={trainers.get('trainer', 'deep')}", "model.path=m", "deep.depth=3"]))


def test_a_trainer_of_the_engine_cannot_be_replaced(offers: Offers) -> None:
    module = offers(trainer="sft")
    assert "acme-a:sft" in list_trainer_names()
    assert structure(load(None, ["trainer=sft", "model.path=m", "data.train=d"])).problems == ()
    assert module not in sys.modules


def test_its_own_table_counts_for_the_seal_of_a_run() -> None:
    """Options of a trainer may name code, as those of a plugin may."""
    one, other = ({"trainer": "acme-a:deep", "deep": {"depth": depth}} for depth in (1, 2))
    assert digests_of(one)["deep"] != digests_of(other)["deep"]
