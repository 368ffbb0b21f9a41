"""Pages that explain the code name what is there: terms of the glossary, and files of the architecture page."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"
FOLDERS = (ROOT / "skyrl_engine", *sorted(ROOT.glob("plugins/*/src")))
PLACEHOLDERS = {"./file.py:name", "distribution:name", "[start, stop)"}
"""Texts in the glossary that show a form, not a name."""


@functools.cache
def names_of_code() -> frozenset[str]:
    """Names that the code defines, names of its modules and packages, and texts that are one word, such as the values of a key."""
    names: set[str] = set()
    for folder in FOLDERS:
        for path in folder.rglob("*.py"):
            names |= {path.stem, path.parent.name, *names_in(ast.parse(path.read_text()))}
    return frozenset(names)


def names_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def names_in_glossary(page: str) -> list[str]:
    """Return the names of code in the first two columns of every table, and in the rules at the end."""
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")]
    ours = "\n".join(cell for cells in rows for cell in cells) + page[page.index("## Names in code") :]
    return re.findall(r"`([^`]+)`", ours)


def unknown_in_glossary(page: str) -> list[str]:
    """Return the names of the page that nothing in the project has."""
    code, files = names_of_code(), {path.name for folder in FOLDERS for path in folder.rglob("*.py")}
    reference = "".join(
        (ROOT / "docs" / "reference" / name).read_text() for name in ("configuration.md", "cli.md", "rl-metrics.md")
    )
    unknown = []
    for text in names_in_glossary(page):
        if text in PLACEHOLDERS or text in files or f"`{text}`" in reference or f"### {text}\n" in reference:
            continue
        if text.endswith("_") or text.startswith("_"):
            known = any(name.startswith(text) or name.endswith(text) for name in code | files)
        else:
            known = set(re.findall(r"[A-Za-z_]\w*", text)) - {"True", "False", "None", "json"} <= code
        if not known:
            unknown.append(text)
    return unknown


def test_names_in_the_glossary_exist() -> None:
    page = GLOSSARY.read_text()
    assert unknown_in_glossary(page) == []
    assert len(names_in_glossary(page)) > 60, "the tables are read"


@pytest.mark.parametrize("wrong", ["compute_rewords", "rl.groop_size", "journals.py", "policy/gap_meen", "Engine.train_all"])
def test_a_name_that_nothing_has_is_found(wrong: str) -> None:
    assert unknown_in_glossary(f"| term | a meaning (`{wrong}`) | - |\n## Names in code\n") == [wrong]


def test_a_term_has_one_row() -> None:
    terms = re.findall(r"^\| ([^|]+?)(?: \(`[^`]+`\))? \|", GLOSSARY.read_text(), re.MULTILINE)
    repeated = {term for term in terms if terms.count(term) > 1} - {"term"}
    assert repeated == set()
    assert len(terms) > 80


def missing_files(page: str) -> list[str]:
    """Return the paths of a page that are no file or folder: of the engine, or of the repository."""
    paths = re.findall(r"`((?:[\w-]+/)+(?:[\w.-]+)?)`|`([\w-]+\.py)`", page)
    written = {path or file for path, file in paths}
    return sorted(path for path in written if not any((base / path).exists() for base in (ROOT / "skyrl_engine", ROOT)))


def test_files_on_the_architecture_page_exist() -> None:
    page = ARCHITECTURE.read_text()
    section = page[page.index("## A sample's way") : page.index("## Kinds")]
    assert [path for path in missing_files(section) if path not in ("checkpoints/", "model/")] == []
    assert "## A rollout's way" in section


def test_a_file_that_is_not_there_is_found() -> None:
    assert missing_files("`engine/engine.py`, `rollout/`, `engine/engines.py` and `plugins/losses/`") == ["engine/engines.py"]


def pages() -> list[Path]:
    """Return the pages that describe the project as it is; decisions, and the record of mutation testing, name what was there then."""
    files = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("plugins/*/README.md")]
    return [path for path in files if path.parent.name != "adr" and path.name != "mutation-testing.md"]


IN_CODE = ("skyrl_engine.", "contracts.", "interop.", "model_facts.", "modeling.", "testing.")
"""Beginnings of names that are code; `run.directory` and `data.train` are keys of the configuration."""


def unknown_modules(text: str) -> list[str]:
    """Return the dotted names of a text, such as `skyrl_engine.modeling.scorer` or `modeling.lora`, that nothing in the engine has."""
    groups = {
        name
        for path in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml"))
        for name in re.findall(r'entry-points."([\w.]+)"', path.read_text())
    }
    names = [name for name in re.findall(r"`((?:[a-z_]+\.)+[A-Za-z]\w*)[(`]", text) if name.startswith(IN_CODE)]
    return [name for name in names if name not in groups and not set(name.split(".")) <= names_of_code()]


def test_modules_that_pages_name_exist() -> None:
    texts = {path: path.read_text() for path in pages()}
    assert sum("skyrl_engine." in text for text in texts.values()) > 15, "pages name modules"
    assert {path.relative_to(ROOT).as_posix(): unknown_modules(text) for path, text in texts.items() if unknown_modules(text)} == {}


def test_a_module_that_is_not_there_is_found() -> None:
    text = "`modeling.rehearsals.rehearse`, `skyrl_engine.modeling.scorer`, `modeling.lora` and `run.directory`"
    assert unknown_modules(text) == ["modeling.rehearsals.rehearse"]


def test_new_names_in_the_tables_of_changelogs_exist() -> None:
    pages_with_table = [
        path for path in (ROOT / "CHANGELOG.md", *ROOT.glob("plugins/*/CHANGELOG.md")) if "### Renamed public" in path.read_text()
    ]
    new = [
        name for path in pages_with_table for name in re.findall(r"^\| `[\w.]+` \| `([\w.]+)` \|$", path.read_text(), re.MULTILINE)
    ]
    assert len(new) > 200, "the tables are read"
    assert [name for name in new if not set(name.split(".")) <= names_of_code()] == []


def missing_in_readme(readme: Path, text: str) -> list[str]:
    """Return the names of Python files in a plugin's README that the plugin does not have."""
    named = re.findall(r"`(?:[\w-]+/)*([\w-]+\.py)`", text)
    files = {path.name for path in readme.parent.rglob("*.py")}
    return [name for name in named if name not in files]


@pytest.mark.parametrize("readme", sorted(ROOT.glob("plugins/*/README.md")), ids=lambda path: path.parent.name)
def test_files_that_a_readme_names_exist(readme: Path) -> None:
    assert missing_in_readme(readme, readme.read_text()) == []
    assert missing_in_readme(readme, "`tests/test_none.py`") == ["test_none.py"]
