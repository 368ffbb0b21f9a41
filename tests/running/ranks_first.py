"""The order in which workers take files: those whose tests start ranks first, so that what is short is left for the end.

`--dist loadfile` hands whole files to whichever worker is free, in this order if xdist is told not to sort them by their number of tests.
"""

from pathlib import PurePosixPath

import pytest

OF_MANY_RANKS = (
    "plugins/megatron", "tests/proof", "plugins/fsdp", "plugins/deepspeed", "tests/training", "tests/integration", "tests/workers",
)  # fmt: skip
"""Folders whose tests start processes that wait for each other, the longest first."""


def turn(name: str) -> int:
    """When the test of this name has its turn, from 0."""
    file = PurePosixPath(name.partition("::")[0])
    return next((place for place, folder in enumerate(OF_MANY_RANKS) if file.is_relative_to(folder)), len(OF_MANY_RANKS))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: turn(item.nodeid))
