"""Names that files import from the project exist: in benchmarks, templates and scripts too, which no other test imports."""

import ast
import functools
import string
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Imports = Callable[..., set[str]]
ROOT = Path(__file__).parents[2]
SOURCES = {folder.name: folder for folder in (ROOT / "skyrl_engine", *ROOT.glob("plugins/*/src/*"), *ROOT.glob("contrib/*/src/*"))}
NAMES = dict.fromkeys(("package", "title", "name", "distribution", "description", "function", "kind", "plugin"), "new")
"""Values for the placeholders of a template."""


@functools.cache
def defined_names(module: Path) -> frozenset[str]:
    """Names at the top of a module, and texts in it that are one word: packages that import lazily name what they offer in a table."""
    return frozenset(_definitions(ast.parse(module.read_text())))


def _definitions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def is_there(name: str) -> bool:
    """Return True for the full name of a package, a module, or something that a module defines."""
    package, *parts = name.split(".")
    path = SOURCES[package]
    for place, part in enumerate(parts):
        if (path / part).is_dir():
            path /= part
            continue
        module, rest = (
            (path / f"{part}.py", parts[place + 1 :]) if (path / f"{part}.py").exists() else (path / "__init__.py", parts[place:])
        )
        return not rest or (module.exists() and rest[0] in defined_names(module))
    return True


def files() -> list[Path]:
    folders = ("skyrl_engine", "plugins", "contrib", "tests", "docs")
    python = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    templates = (ROOT / "skyrl_engine").rglob("*.py.in")
    return [ROOT / "noxfile.py", *sorted(python), *sorted(templates)]


def test_what_files_import_from_the_project_is_there(imports: Imports) -> None:
    wrong, templates = [], 0
    for path in files():
        text = path.read_text()
        if path.suffix == ".in":
            text = string.Template(text).safe_substitute(NAMES)
            templates += 1
        names = {name for name in imports(text) if name.partition(".")[0] in SOURCES}
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names) if not is_there(name)]
    assert templates > 20
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("skyrl_engine.modeling.sampler_model.fill", True),
        ("skyrl_engine.contracts.FactoryContext", True),
        ("skyrl_engine.contracts", True),
        ("skyrl_engine.modeling.twin.fill", False),
        ("skyrl_engine.modeling.sampler_model.copied_model", False),
        ("skyrl_engine.contracts.NoSuchName", False),
    ],
)
def test_a_name_that_is_not_there_is_seen(name: str, there: bool) -> None:
    assert is_there(name) == there
