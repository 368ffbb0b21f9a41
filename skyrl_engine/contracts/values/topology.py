"""The place of a rank in the parallel layout."""

from typing import Final

from attrs import field, frozen
from attrs.validators import ge

MOST_TENSOR_PARALLEL: Final = 8
"""Ranks of a machine, beyond which tensor-parallel ranks would talk over a network."""


def list_divisors(ranks: int, most: int | None = None) -> tuple[int, ...]:
    """Return the sizes of a parallel dimension that divide so many ranks, smallest first, up to `most`."""
    return tuple(size for size in range(1, min(ranks, most or ranks) + 1) if ranks % size == 0)


@frozen
class Topology:
    """Sizes of the parallel dimensions; their product is the world size. Rank numbers run tp fastest, then cp, dp, pp."""

    dp: int = field(default=1, validator=ge(1))
    tp: int = field(default=1, validator=ge(1))
    cp: int = field(default=1, validator=ge(1))
    pp: int = field(default=1, validator=ge(1))

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def coords(self, rank: int) -> "RankCoords":
        """Coordinates of world rank `rank`."""
        assert 0 <= rank < self.world_size, f"rank {rank} outside a world of {self.world_size}"
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return RankCoords(rank=rank, dp=dp, tp=tp, cp=cp, pp=pp, last_stage=pp == self.pp - 1)


@frozen
class RankCoords:
    """One rank's place: its world rank and its index on every parallel dimension."""

    rank: int = 0
    dp: int = 0
    tp: int = 0
    cp: int = 0
    pp: int = 0
    last_stage: bool = True

    @property
    def collects(self) -> bool:
        """True where this rank's outputs are kept: first tensor and context rank of the last pipeline stage."""
        return self.tp == 0 and self.cp == 0 and self.last_stage
