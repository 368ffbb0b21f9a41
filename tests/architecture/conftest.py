"""The imports of a file, read from its text."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def list_imported(text: str, *, package: str = "", at_run_time: bool = False) -> set[str]:
    """Full names that Python text imports, at the top and inside functions: "a.b.c" for `from a.b import c`.

    `package` resolves relative imports; `at_run_time` leaves out what is under `if TYPE_CHECKING`.
    """
    names: set[str] = set()
    for node in _nodes(ast.parse(text), at_run_time=at_run_time):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def _nodes(node: ast.AST, *, at_run_time: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if at_run_time and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield from _nodes(child, at_run_time=at_run_time)


@pytest.fixture
def imports() -> Callable[..., set[str]]:
    return list_imported


@pytest.fixture
def root() -> Path:
    return ROOT


@pytest.fixture
def engine() -> Path:
    return ROOT / "skyrl_engine"
