"""Losses and reducers of the how-to pages, held to the conformance kit as a reader's own would be."""

import re
from pathlib import Path

import pytest

from skyrl_engine.testing import verify
from skyrl_engine.testing.subject import select_plugin

PAGES = Path(__file__).parents[2] / "docs/how-to"
PLUGINS = [
    ("loss", "write-a-loss.md", "with_z_loss"),
    ("loss", "write-a-loss.md", "smoothed"),
    ("loss", "write-a-loss.md", "top_k_kl"),
    ("reducer", "write-a-reducer.md", "softened"),
    ("reducer", "write-a-reducer.md", "by_domain"),
]


@pytest.mark.conformance
@pytest.mark.parametrize(("kind", "page", "name"), PLUGINS)
def test_it_keeps_every_promise(kind: str, page: str, name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text("\n".join(part for part in blocks if "@loss" in part or "@reducer" in part))
    verdict = verify(select_plugin(kind, f"./mine.py:{name}", {}, base=tmp_path), examples=20, given=())
    assert verdict.kept, [part for part in verdict.findings if part.status in ("broken", "undecided")]
