"""Ranks as fixtures.

`pair` and `quad` share theirs with all tests of the session, `alone` makes this process the only rank of a world, and with `without_ray` runs
of several ranks start them as these fixtures do.
"""

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from skyrl_engine.testing.ranks.world import World, alone, start_shared_world
from skyrl_engine.testing.ranks.world_transport import OwnRanksTransport


@pytest.fixture(scope="session")
def pair() -> World:
    """Two ranks in processes of their own."""
    return start_shared_world(2)


@pytest.fixture(scope="session")
def quad() -> World:
    """Four of them."""
    return start_shared_world(4)


@pytest.fixture(name="alone", scope="module")
def one_rank() -> Iterator[None]:
    """This process as a world of one rank."""
    with alone():
        yield


@pytest.fixture(scope="module")
def without_ray() -> Iterator[None]:
    """For tests of what a run computes on several ranks. Ray itself is held by tests/workers and by a killed rank."""
    with patch("skyrl_engine.workers.ray_transport.RayTransport", lambda spec, *_: OwnRanksTransport(spec)):
        yield
