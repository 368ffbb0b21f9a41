"""A small wheel, and a catalogue of it as if it had been verified."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_wheels import build_wheel, index_of


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of acme-tiny 0.1.0, whose reducer keeps its promises. Copy it before you change it."""
    return build_wheel(tmp_path_factory.mktemp("wheels") / "tiny")


@pytest.fixture
def catalogue(tiny: Path, tmp_path: Path) -> Callable[..., Path]:
    """`catalogue(sha256=...)`: the index.json of a folder with acme-tiny and an index that says so, with these changes."""

    def write(**changes: object) -> Path:
        folder = tmp_path / "catalogue"
        folder.mkdir(exist_ok=True)
        shutil.copy(tiny, folder)
        (folder / "index.json").write_text(index_of(tiny, **changes).to_json())
        return folder / "index.json"

    return write
