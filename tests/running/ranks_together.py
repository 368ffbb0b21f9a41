"""Where `--dist loadfile` runs a test: all that start ranks on one worker, which keeps them; the others by file, with its fixtures."""

from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

OF_MANY_RANKS = (
    "tests/integration", "tests/training", "tests/workers", "tests/proof", "plugins/deepspeed", "plugins/fsdp", "plugins/megatron",
)  # fmt: skip
"""Folders whose tests start processes that wait for each other. Two such folders at once would only wait longer, in twice the memory."""


def together(name: str) -> bool:
    """Whether the test of this name starts ranks."""
    file = PurePosixPath(name.partition("::")[0])
    return any(file.is_relative_to(folder) for folder in OF_MANY_RANKS)


class RanksTogether(LoadFileScheduling):
    """Hands whole files to workers, and all files of ranks to one."""

    def _split_scope(self, nodeid: str) -> str:
        return "ranks" if together(nodeid) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RanksTogether | None:
    return RanksTogether(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not together(item.nodeid))  # they take longest, so that one worker begins with them
