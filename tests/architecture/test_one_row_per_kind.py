"""A kind of plugin is one row of registry/kinds.py: whatever else lists kinds reads the rows, and what rows name is there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from skyrl_engine.cli.scaffold.examples import Scaffold
from skyrl_engine.config.schema import PluginTable
from skyrl_engine.hooks import spec
from skyrl_engine.registry.kinds import AUTO, KINDS, TABLES, Kind, import_object
from skyrl_engine.registry.known import list_first_party

ALLOWED = {
    "config/trainers.py": "a trainer names the kinds it uses",
    "__init__.py": "the decorators `loss`, `correction` and `reducer` are exported by name",
}
FEW = 2


def lists_of_kinds(text: str) -> Iterator[int]:
    """Lines where a tuple, list, set, dict, match or chain of comparisons holds the names of more than FEW kinds."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Tuple(elts) | ast.List(elts) | ast.Set(elts) | ast.Dict(keys=elts):
                inside = list(elts)
            case ast.Match(cases=cases):
                inside = [part for case in cases for part in ast.walk(case.pattern)]
            case ast.If(test=test, orelse=orelse):
                inside = list(ast.walk(test))
                while orelse and isinstance(orelse[0], ast.If):
                    inside += ast.walk(orelse[0].test)
                    orelse = orelse[0].orelse
            case _:
                continue
        names = {part.value for part in inside if isinstance(part, ast.Constant) and isinstance(part.value, str)}
        if len(names & KINDS.keys()) > FEW:
            yield node.lineno


def test_no_other_module_lists_the_kinds(engine: Path) -> None:
    found = {str(file.relative_to(engine)): list(lists_of_kinds(file.read_text())) for file in engine.rglob("*.py")}
    assert {name for name, lines in found.items() if lines} == set(ALLOWED)


@pytest.mark.parametrize(
    "text",
    [
        'KINDS = ("loss", "reducer", "merger")',
        'chosen = {"loss": 1, "backend": 2, other: 3, "observer": 4}',
        'def f(kind):\n  match kind:\n    case "loss": pass\n    case "merger" | "reducer": pass',
        'if k == "loss": pass\nelif k == "reducer": pass\nelif k == "backend": pass',
    ],
)
def test_a_list_of_kinds_would_be_seen(text: str) -> None:
    assert list(lists_of_kinds(text))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_what_a_row_names_is_there(kind: Kind, engine: Path) -> None:
    assert all(hasattr(spec, hook) for hook in (*kind.hooks, *kind.product_hooks))
    assert (kind.contract is None) == bool(kind.product_hooks)
    assert kind.contract is None or kind.contract.startswith("skyrl_engine.contracts:"), "authors import contracts from there"
    if kind.table is not None:
        assert attrs.has(import_object(kind.table))
        assert isinstance(import_object(kind.table)(kind.default), PluginTable)
    assert kind.option <= (kind.table is not None) == (kind.default is not None)
    assert {promise.name for promise in import_object(kind.suite)}
    assert (kind.scaffold is None) == bool(kind.no_scaffold and kind.start_from)
    assert kind.scaffold is None or isinstance(import_object(kind.scaffold), Scaffold)
    assert (engine / "cli" / "scaffold" / "templates" / kind.name).is_dir() == (kind.scaffold is not None)
    assert kind.values is None or list(import_object(kind.values)(object())) == [], "what a product lacks is not a wrong value"


def test_tables_are_kinds() -> None:
    assert list(TABLES) == [name for name, kind in KINDS.items() if kind.table]


def test_the_default_of_a_kind_is_one_of_ours() -> None:
    for kind in TABLES.values():
        assert kind.default in list_first_party(kind.name) or (kind.automatic and kind.default == AUTO)


def test_the_architecture_page_names_every_kind() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "architecture.md").read_text()
    (sentence,) = (part for part in page.split("\n\n") if part.startswith("A kind is ") and "[one row]" in part)
    assert [name for name in KINDS if f"`{name}`" not in sentence] == []
