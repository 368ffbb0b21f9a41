"""Processor seconds by test file, appended to the file that CHECK_SECONDS names; without it nothing is measured.

    python tests/running/seconds_per_file.py .cache/check-seconds.jsonl

prints the largest rows as a Markdown table. Counted are the test process and everything that it started, ranks and Ray's daemons too: times
of all processes below it, which hold those of the ended ones that they waited for.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
LARGEST = 25


def processor_seconds(root: int) -> float:
    """Total of `root` and all processes below it."""
    found = dict(processes())
    below: dict[int, list[int]] = defaultdict(list)
    for number, (parent, _) in found.items():
        below[parent].append(number)
    total, waiting = 0.0, [root]
    while waiting:
        number = waiting.pop()
        total += found.get(number, (0, 0.0))[1]
        waiting += below[number]
    return total


def processes() -> Iterator[tuple[int, tuple[int, float]]]:
    """Parent and seconds by process, those of its ended children among them; proc(5) has the columns."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                _, _, state = (entry / "stat").read_text().rpartition(")")
            except OSError:  # it ended while we looked
                continue
            columns = state.split()
            yield int(entry.name), (int(columns[1]), sum(map(int, columns[11:15])) / TICKS)


class SecondsPerFile:
    """Measures where one file's tests end and another's begin, so that measuring costs nothing."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._since: tuple[float, float] | None = None
        self._tests = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if self._since is None:
            self._since = processor_seconds(os.getpid()), time.monotonic()
        try:
            return (yield)
        finally:
            self._tests += 1
            if nextitem is None or nextitem.path != item.path:
                self._record(item.nodeid.partition("::")[0])

    def _record(self, file: str) -> None:
        assert self._since is not None
        processor, wall = self._since
        row = {
            "file": file,
            "tests": self._tests,
            "cpu": processor_seconds(os.getpid()) - processor,
            "wall": time.monotonic() - wall,
        }
        with self._target.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        self._since, self._tests = None, 0


def pytest_configure(config: pytest.Config) -> None:
    target = os.environ.get("CHECK_SECONDS")
    if target and Path("/proc/self/stat").exists():
        config.pluginmanager.register(SecondsPerFile(Path(target)))


def table(rows: list[dict[str, float | str]]) -> str:
    """Markdown: the files that cost most, and what is left for all others."""
    total: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for row in rows:
        for place, name in enumerate(("tests", "cpu", "wall")):
            total[str(row["file"])][place] += float(row[name])
    order = sorted(total, key=lambda file: -total[file][1])
    others = [sum(total[file][place] for file in order[LARGEST:]) for place in range(3)]
    shown = [(f"`{file}`", total[file]) for file in order[:LARGEST]] + [(f"{len(order[LARGEST:])} others", others)]
    lines = [f"| {name} | {tests:.0f} | {cpu:.0f} | {wall:.0f} |" for name, (tests, cpu, wall) in shown]
    return "\n".join(["| file | tests | CPU s | wall s |", "|---|--:|--:|--:|", *lines])


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
