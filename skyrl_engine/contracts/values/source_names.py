"""Sources of samples: the datasets, or the environments, that a run trains on together. Samples carry their source's number."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

SOURCE: Final = "source_number"
"""Name of the sample value, int64[N], that says which source a sample is from, counted from 0. Samples of one source have none."""

BY_SOURCE: Final = "by_source/"
"""Begins the names of metrics of one source on their way to the report: by_source/NUMBER/METRIC."""


def make_distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names; those that come several times get a number: `train_1`, `train_2`."""
    counts, taken = Counter(names), set(names)
    distinct: list[str] = []
    numbers: Counter[str] = Counter()
    for name in names:
        numbered_name = name
        while counts[name] > 1 and numbered_name in taken:
            numbers[name] += 1
            numbered_name = f"{name}_{numbers[name]}"
        taken.add(numbered_name)
        distinct.append(numbered_name)
    return tuple(distinct)
