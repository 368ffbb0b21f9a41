"""Only registry/loader.py loads entry points, but for the reader of lists (ADR 23); nothing else imports code by a name that it was given."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

BY_NAME = {
    "import_module",
    "__import__",
    "exec",
    "eval",
    "EntryPoint",
    "entry_points",
    "run_path",
    "run_module",
    "module_from_spec",
    "spec_from_file_location",
    "load_setuptools_entrypoints",
    "load_entry_point",
}
ALLOWED = {
    "lazy.py": {"import_module"},  # names of facades, when first used
    "contracts/values/ingest.py": {"entry_points"},  # loads the reader of lists, which no configuration names: ADR 23
    "cli/lazy.py": {"import_module"},  # the engine's own commands
    "registry/kinds.py": {"import_module"},  # the engine's own contracts, written down in kinds.py
    "registry/discovery.py": {"entry_points"},  # reads them
    "registry/compat.py": {"entry_points"},  # reads them
    "catalogue/wheel_facts.py": {"entry_points"},  # reads those of a wheel that is not installed
    "registry/loader.py": {"EntryPoint"},  # loads one
    "registry/function_references.py": {"import_module"},  # rewards, tools and schedules that a user names
    "registry/local_module.py": {"exec"},  # runs a local file, for loader.py and references.py alone
}


BUILTINS = {"exec", "eval", "__import__"}


def names_used(text: str) -> set[str]:
    """Names of BY_NAME that code reads, imports, or takes from something else; builtins where they are called."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            used.add(node.func.id)
        elif isinstance(node, ast.Name):
            used |= {node.id} - BUILTINS
        elif isinstance(node, ast.Attribute):
            used |= {node.attr} - BUILTINS
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
    return used & BY_NAME


def test_code_is_imported_by_name_in_these_places_only(engine: Path) -> None:
    used = {file.relative_to(engine).as_posix(): names_used(file.read_text()) for file in engine.rglob("*.py")}
    assert {file: names for file, names in used.items() if names} == ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "from importlib.metadata import entry_points",
        "importlib.import_module(name)",
        "[point.load() for point in distribution.entry_points]",
        "exec(text)",
        "manager.load_setuptools_entrypoints('x')",
    ],
)
def test_another_place_would_be_seen(text: str) -> None:
    assert names_used(text)


def test_only_plugins_and_functions_that_a_user_names_run_local_files(engine: Path, imports: Callable[..., set[str]]) -> None:
    users = [
        file.relative_to(engine).as_posix()
        for file in engine.rglob("*.py")
        if any(name.startswith("skyrl_engine.registry.local_module") for name in imports(file.read_text()))
    ]
    assert sorted(users) == ["registry/function_references.py", "registry/loader.py"]
