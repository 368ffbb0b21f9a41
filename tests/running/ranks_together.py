"""Where `--dist loadgroup` runs a test: all that start ranks on one worker, which keeps them; the others by file, with its fixtures."""

from pathlib import PurePosixPath

import pytest

OF_MANY_RANKS = (
    "tests/integration", "tests/training", "tests/workers", "tests/proof", "plugins/deepspeed", "plugins/fsdp", "plugins/megatron",
)  # fmt: skip
"""Folders whose tests start processes that wait for each other. Two such folders at once would only wait longer, in twice the memory."""


def together(item: pytest.Item) -> bool:
    file = PurePosixPath(item.nodeid.partition("::")[0])
    return any(file.is_relative_to(folder) for folder in OF_MANY_RANKS)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.xdist_group("ranks" if together(item) else item.nodeid.partition("::")[0]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not together(item))  # they take longest, so that one worker begins with them
