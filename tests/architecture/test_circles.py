"""No modules import each other in a circle, within a package or across packages, not even for types: a reader begins at one of them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

Imports = Callable[..., set[str]]

FACADES = {"skyrl_engine"}
"""Packages whose `__init__.py` offers names of modules that import it, and loads them when first used: what it imports is no circle."""


def modules_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules below a folder of sources by name: "a.b" for `a/b.py` and for `a/b/__init__.py`."""
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def read_graph(texts: Mapping[str, tuple[str, bool]], imports: Imports) -> dict[str, set[str]]:
    """Return the modules that each module imports; `texts` holds by name a module's text, and whether it is a package."""
    graph: dict[str, set[str]] = {}
    for module, (text, is_package) in texts.items():
        targets = imports(text, package=module if is_package else module.rpartition(".")[0])
        graph[module] = {found for name in targets if (found := _longest_known(name, texts)) not in (None, module)}
    return graph


def _longest_known(name: str, known: Mapping[str, object]) -> str | None:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def find_circles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return, for each module that is on a circle, a shortest one from it; each circle once."""
    circles = {}
    for start in sorted(graph):
        ways = [(start,)]
        seen = {start}
        while ways:
            path = ways.pop(0)
            if start in graph[path[-1]]:
                circles.setdefault(frozenset(path), path)
                break
            for step in sorted(graph[path[-1]] - seen):
                seen.add(step)
                ways.append((*path, step))
    return list(circles.values())


def test_no_modules_import_each_other(root: Path, imports: Imports) -> None:
    folders = [folder for pattern in ("plugins/*/src", "contrib/*/src") for folder in root.glob(pattern)]
    files = {f"skyrl_engine.{name}".rstrip("."): file for name, file in modules_of(root / "skyrl_engine")}
    files |= {name: file for folder in folders for name, file in modules_of(folder)}
    assert len(files) > 600, "the folders are where they were"
    graph = read_graph({name: (file.read_text(), file.name == "__init__.py") for name, file in files.items()}, imports)
    assert find_circles(_without_imports_of(FACADES, graph)) == []
    assert all(find_circles(_without_imports_of(FACADES - {facade}, graph)) for facade in FACADES), (
        "an exception that is not needed"
    )


def _without_imports_of(facades: set[str], graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    return {module: set() if module in facades else targets for module, targets in graph.items()}


@pytest.mark.parametrize(
    "texts",
    [
        {"a.one": "from a.two import f", "a.two": "from a import one"},
        {"a.one": "from a.two import f", "a.two": "if TYPE_CHECKING:\n    from a.one import T"},
        {"a.one": "from a.two import f", "a.two": "def f():\n    from a.one import T"},
        {"a.one": "from b.two import f", "b.two": "import c.three", "c.three": "from a.one import g"},
        {"a.one": "from .two import f", "a.two": "from . import one"},
    ],
)
def test_a_circle_would_be_seen(imports: Imports, texts: dict[str, str]) -> None:
    circle = set(texts)
    graph = read_graph({name: (text, False) for name, text in (texts | {"d.beside": "from a.one import f"}).items()}, imports)
    assert [set(found) for found in find_circles(graph)] == [circle]


def test_one_way_is_no_circle(imports: Imports) -> None:
    texts = {"a.one": "from a.two import f\nfrom a.three import g", "a.two": "from a.three import g", "a.three": "import torch"}
    assert find_circles(read_graph({name: (text, False) for name, text in texts.items()}, imports)) == []
