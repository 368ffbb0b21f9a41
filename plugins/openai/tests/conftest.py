"""A tiny model of printable letters with a chat template, and endpoints over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_routes import Endpoint, serve_endpoint, write_letters_model

Served = tuple[str, Endpoint]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    place = tmp_path_factory.mktemp("model")
    write_letters_model(place)
    return place


@pytest.fixture(scope="session")
def _plain(folder: Path) -> Iterator[Served]:
    with serve_endpoint(folder) as served:
        yield served


@pytest.fixture(scope="session")
def _like_vllm(folder: Path) -> Iterator[Served]:
    with serve_endpoint(folder, like_vllm=True) as served:
        yield served


@pytest.fixture
def plain(_plain: Served) -> Iterator[Served]:
    """A plain endpoint, as (base URL, endpoint)."""
    yield _plain
    _plain[1].misbehaviour.clear()


@pytest.fixture
def like_vllm(_like_vllm: Served) -> Iterator[Served]:
    """An endpoint that knows vLLM's parameters."""
    yield _like_vllm
    _like_vllm[1].misbehaviour.clear()
