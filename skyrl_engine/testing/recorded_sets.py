"""Sets of texts whose order a plugin's own code uses, recorded while it runs: another process must not share it by chance.

The plugin is loaded again from its source, in which whatever is iterated over, passed on or returned goes through a function that notes sets.
A process that records does nothing else afterwards: it is a fork that answers one question.
"""

import ast
import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, Final

from attrs import define, field, frozen

from skyrl_engine.registry.record import PluginRecord

Texts = tuple[Any, ...]
"""Members of a set: texts, bytes, or tuples that hold some."""

Orders = Mapping[frozenset[Any], frozenset[Texts]]
"""The orders in which sets were met, by their members."""

_LARGEST: Final = 8
"""Members of a set that is looked at: a larger one hardly has one order in two processes."""

_NOTE: Final = "__skyrl_engine_note_set__"

_ORDERLESS: Final = ("sorted", "len", "set", "frozenset", "any", "all", "isinstance", "bool")
"""Functions that, without keywords, give one answer for a set in any order."""


@frozen
class Sources:
    """A plugin's own code: the file `place`, or the folder `place` of a package."""

    place: str
    package: str | None = None

    def hold(self, path: str) -> bool:
        """Return True for one of these files."""
        return path == self.place or (self.package is not None and Path(self.place) in Path(path).parents)


def find_sources(record: PluginRecord) -> Sources | None:
    """Return where a plugin's own code is: its file, or its outermost package with an `__init__`; None for the engine's own plugins."""
    if record.source == "file":
        return Sources(str(record.path))
    names = record.target.partition(":")[0].split(".")
    if names[0] == __name__.partition(".")[0]:
        return None
    for count in range(1, len(names) + 1):
        spec = find_spec(".".join(names[:count]))
        if spec is not None and spec.origin is not None:
            is_package = spec.submodule_search_locations is not None
            return Sources(str(Path(spec.origin).parent) if is_package else spec.origin, spec.name)
    return None


def record_sets(sources: Sources, function: Callable[..., Any], *arguments: object) -> tuple[Any, Orders]:
    """Return what a function returns, which loads the plugin of these sources, and the sets of 2 to 8 texts whose order their code used."""
    notes = _Notes()
    setattr(builtins, _NOTE, notes.note)
    _load_noting(sources)
    if sources.package is not None:
        for name in [name for name in sys.modules if name == sources.package or name.startswith(f"{sources.package}.")]:
            del sys.modules[name]
    value = function(*arguments)
    return value, notes.list_orders()


@define(eq=False)
class _Notes:
    """The small sets that it was shown, by their members: the orders that they had then."""

    orders: dict[frozenset[Any], set[Texts]] = field(factory=dict)

    def note(self, value: Any) -> Any:
        """Note a set, and return the value, whatever it is."""
        if type(value) in (set, frozenset) and 2 <= len(value) <= _LARGEST:
            self.orders.setdefault(frozenset(value), set()).add(tuple(value))
        return value

    def list_orders(self) -> Orders:
        """Return those that another process may order otherwise."""
        return {members: frozenset(orders) for members, orders in self.orders.items() if _has_a_chance_order(members)}


def _has_a_chance_order(members: frozenset[Any]) -> bool:
    """Say if all members can be written down, and the hash of some is another in every process."""
    leaves = [leaf for member in members for leaf in _list_leaves(member)]
    return all(isinstance(leaf, str | bytes | int | None) for leaf in leaves) and any(
        isinstance(leaf, str | bytes) for leaf in leaves
    )


def _list_leaves(member: Any) -> Iterator[Any]:
    if type(member) is tuple:
        for inside in member:
            yield from _list_leaves(inside)
    else:
        yield member


# --- the plugin's code, which shows its sets ---------------------------------------------------------------------------------------


def _load_noting(sources: Sources) -> None:
    """Let this process load these sources from their files, and show sets to what notes them."""
    get_code, source_to_code = SourceFileLoader.get_code, SourceFileLoader.source_to_code

    def get_noting(loader: SourceFileLoader, name: str) -> CodeType | None:
        path = loader.get_filename(name)
        return loader.source_to_code(loader.get_data(path), path) if sources.hold(path) else get_code(loader, name)

    def compile_noting(loader: SourceFileLoader, data: Any, path: Any, **more: Any) -> CodeType:
        if not sources.hold(str(path)):
            return source_to_code(loader, data, path, **more)
        tree = _ShowSets().visit(ast.parse(data, path))
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code

    SourceFileLoader.get_code = get_noting  # type: ignore[method-assign, assignment]
    SourceFileLoader.source_to_code = compile_noting  # type: ignore[method-assign, assignment]


class _ShowSets(ast.NodeTransformer):
    """Shows what is iterated over, unpacked, passed on or returned: where a set goes, its order goes with it."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        function = node.func
        if not (isinstance(function, ast.Name) and function.id in _ORDERLESS and not node.keywords):
            node.args = [argument if isinstance(argument, ast.Starred) else _show(argument) for argument in node.args]
            for keyword in node.keywords:
                keyword.value = _show(keyword.value)
        if isinstance(function, ast.Attribute) and function.attr == "pop":
            function.value = _show(function.value)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        if any(isinstance(target, ast.Tuple | ast.List) for target in node.targets):
            node.value = _show(node.value)
        return node

    def _visit_iterable(self, node: Any) -> Any:
        self.generic_visit(node)
        node.iter = _show(node.iter)
        return node

    def _visit_value(self, node: Any) -> Any:
        self.generic_visit(node)
        if node.value is not None and isinstance(getattr(node, "ctx", None), ast.Load | None):
            node.value = _show(node.value)
        return node

    visit_For = visit_comprehension = _visit_iterable  # noqa: N815 -- names of ast
    visit_Starred = visit_Return = visit_Yield = visit_YieldFrom = visit_FormattedValue = _visit_value  # noqa: N815


def _show(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(_NOTE, ast.Load()), [node], []), node)
