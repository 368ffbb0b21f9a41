"""The kit judges plugins by types and fields of errors: words of a message may change, and a plugin's own message may hold any of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_TEXTS = {"cause", "remedy", "details", "args", "summary", "failure", "message"}
_ERRORS = {"e", "err", "error", "failed", "failure", "refused", "found", "broken", "__cause__", "__context__"}
_SEARCHES = {"startswith", "endswith", "find", "index", "count", "partition", "rpartition", "search", "match", "fullmatch"}
_READS_FORM = "error_checks.py"
"""The check that a message ends without a final stop, which is about messages."""


def searches_of_messages(text: str) -> Iterator[str]:
    """Yield each expression that looks for words in the text of an error."""
    for node in ast.walk(ast.parse(text)):
        searched: list[ast.expr] = []
        if isinstance(node, ast.Compare) and any(isinstance(operator, ast.In | ast.NotIn) for operator in node.ops):
            searched = node.comparators
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SEARCHES:
            searched = [node.func.value, *node.args]
        if any(_is_message(part) for part in searched):
            yield ast.unparse(node)


def _is_message(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _TEXTS
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"str", "repr", "describe"}:
        return any(ast.unparse(argument).rpartition(".")[2] in _ERRORS for argument in node.args)
    return False


def test_no_verdict_of_the_kit_goes_by_words(engine: Path) -> None:
    found = {
        f"{file.relative_to(engine)}: {line}"
        for file in (engine / "testing").rglob("*.py")
        if file.name != _READS_FORM
        for line in searches_of_messages(file.read_text())
    }
    assert found == set()


@pytest.mark.parametrize(
    "text",
    [
        'if "returned" in error.cause: pass',
        'found = "sample 0" not in failed.cause',
        'isinstance(error.__cause__, AttributeError) and "declares needs" in str(error.__cause__)',
        'cause = failed.cause.partition("WrongDevice: ")[2]',
        're.search("fails", str(error))',
        'answer.failure.startswith("WrongDevice")',
    ],
)
def test_a_search_in_a_message_would_be_seen(text: str) -> None:
    assert list(searches_of_messages(text))
