"""Ranks as fixtures: `pair` and `quad` share theirs with all tests of the session, `alone` makes this process the only rank of a world."""

from collections.abc import Iterator

import pytest

from skyrl_engine.testing.ranks.world import World, alone, kept


@pytest.fixture(scope="session")
def pair() -> World:
    """Two ranks in processes of their own."""
    return kept(2)


@pytest.fixture(scope="session")
def quad() -> World:
    """Four of them."""
    return kept(4)


@pytest.fixture(name="alone", scope="module")
def one_rank() -> Iterator[None]:
    """This process as a world of one rank."""
    with alone():
        yield
