"""The first sentence of a docstring has a verb, or names a thing: it does not begin as a clause that depends on something unsaid."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLAUSE = re.compile(r'^\s*r?"""(Of|What|Where|Whether|How) ', re.MULTILINE)


def test_no_docstring_begins_as_a_clause() -> None:
    files = [path for top in ("skyrl_engine", "plugins", "contrib", "tests") for path in (ROOT / top).rglob("*.py")]
    assert len(files) > 500
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    assert {name: CLAUSE.findall(text) for name, text in texts.items() if CLAUSE.search(text)} == {}
