"""Parallel sizes as a person writes them, `tp2xpp2`, and the options of a backend that they stand for."""

import re
from collections.abc import Mapping
from math import prod
from typing import Self

from attrs import frozen

from skyrl_engine.contracts.values.topology import Topology

OPTIONS: Mapping[str, str] = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel"}
"""The option by which backends take each size, which is also the capability they declare for it; dp is what is left of the world."""

MOST_RANKS = 64
"""Processes that a layout may take here: each imports torch and holds a model."""


@frozen
class ParallelSizes:
    """Sizes by dimension in the order they were written; one that is missing is 1."""

    sizes: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, saying which form is wanted, or that one machine is not meant to hold so many ranks."""
        sizes: dict[str, int] = {}
        for part in text.split("x"):
            match = re.fullmatch(r"(dp|tp|pp|cp)([1-9]\d*)", part)
            if match is None or match[1] in sizes:
                raise ValueError(f"{text!r} is not of the form tp2xpp2xdp1, with each of dp, tp, pp and cp at most once")
            sizes[match[1]] = int(match[2])
        layout = cls(sizes)
        if layout.ranks > MOST_RANKS:
            raise ValueError(f"{text!r} takes {layout.ranks} processes on this machine, where {MOST_RANKS} are the most")
        return layout

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())

    @property
    def topology(self) -> Topology:
        """The topology that a backend must lay the ranks out in."""
        return Topology(**self.sizes)

    @property
    def options(self) -> dict[str, int]:
        """The backend's options; data parallelism has none."""
        return {option: self.sizes[name] for name, option in OPTIONS.items() if self.sizes.get(name, 1) > 1}

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1) or "1 rank"
