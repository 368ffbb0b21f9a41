"""Decisions (docs/adr) are told apart by their numbers, and what names one finds it."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))


def test_a_number_is_of_one_decision_and_none_is_left_out():
    counts = Counter(int(path.name[:4]) for path in DECISIONS)
    assert sorted(counts.elements()) == list(range(1, len(DECISIONS) + 1))


def test_a_decision_s_name_and_title_have_its_number():
    for path in DECISIONS:
        assert re.fullmatch(r"\d{4}(-[a-z0-9]+)+\.md", path.name), path.name
        title = path.read_text(encoding="utf-8").partition("\n")[0]
        assert title.startswith(f"# {int(path.name[:4])}. "), f"{path.name}: {title}"


def test_every_link_to_a_decision_finds_one():
    """In pages and in changelogs; the site's own build looks at pages alone."""
    names, lost = {path.name for path in DECISIONS}, []
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[!.]*/*/*.md")):
        text = page.read_text(encoding="utf-8")
        lost += [(str(page.relative_to(ROOT)), name) for name in re.findall(r"adr/(\d{4}-[^)\s#]+\.md)", text) if name not in names]
    assert not lost
