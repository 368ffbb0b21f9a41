"""Every suggestion of a near word is found in one place, so that all of them agree on what is near."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_engine.near_words import did_you_mean, find_near_word

Imports = Callable[..., set[str]]


def test_no_other_module_compares_words(root: Path, imports: Imports) -> None:
    sources = [*(root / "skyrl_engine").rglob("*.py"), *root.glob("plugins/*/src/**/*.py"), *root.glob("contrib/*/src/**/*.py")]
    users = {
        file.relative_to(root).as_posix()
        for file in sources
        if any(name.partition(".")[0] in {"difflib", "rapidfuzz", "Levenshtein"} for name in imports(file.read_text()))
    }
    assert users == {"skyrl_engine/near_words.py"}


@pytest.mark.parametrize(
    ("written", "known", "near"),
    [
        ("focall", ["focal", "cross_entropy"], "focal"),
        ("focal", {"focal": 1, "facal": 2}, "focal"),
        (7, ["17", "x"], "17"),
        ("nothing_like_it", ["focal", "cross_entropy"], None),
        ("focal", [], None),
    ],
)
def test_the_nearest_word_is_found(written: object, known: list[str], near: str | None) -> None:
    assert find_near_word(written, known) == near


def test_a_suggestion_shows_the_word_as_asked() -> None:
    assert did_you_mean("focall", ["focal"]) == "Did you mean 'focal'?"
    assert did_you_mean("focall", ["focal"], show=lambda near: f"losses/{near}.py") == "Did you mean losses/focal.py?"
    assert did_you_mean("focall", ["focal"], cutoff=0.99) is None
