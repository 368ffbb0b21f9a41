"""How Hugging Face's tensors become a rank's share of a Megatron parameter, and back. Gradients and moments go the same way."""

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor


class Division(Protocol):
    """One Megatron parameter over tensor-parallel ranks."""

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
        """The share of `rank` in Hugging Face's tensors."""

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """Hugging Face's tensors from the shares of all ranks."""


@frozen
class Whole:
    """Every rank holds all of one tensor."""

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:  # noqa: ARG002 - a rank holds all of it
        return whole[0]

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        return [shares[0]]


@frozen
class VocabularyRows:
    """Consecutive rows of one tensor of `rows` rows, filled up with zeros to what ranks can share equally."""

    rows: int

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
        lacking = -self.rows % ranks
        filled = torch.nn.functional.pad(whole[0], (0, 0, 0, lacking)) if lacking else whole[0]
        return filled.chunk(ranks)[rank]

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shares))[: self.rows]]


@frozen
class Along:
    """One tensor along a dimension, which holds `blocks` one after the other (every expert's gate and up) that are divided each."""

    dimension: int
    blocks: int = 1

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
        return self._blocks(whole[0]).chunk(ranks, self.dimension + 1)[rank].flatten(self.dimension, self.dimension + 1)

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        joined = torch.cat([self._blocks(share) for share in shares], self.dimension + 1)
        return [joined.flatten(self.dimension, self.dimension + 1)]

    def _blocks(self, tensor: Tensor) -> Tensor:
        shape = tensor.shape
        return tensor.reshape(*shape[: self.dimension], self.blocks, -1, *shape[self.dimension + 1 :])


@frozen
class Stacked:
    """Several tensors of `rows` rows, whose rows fall into as many groups each, laid group by group: (first of each), (second of each), ...

    Queries, keys and values are grouped by the key head that queries share (`groups` = key heads); gate and up, whose halves megatron-core
    keeps apart on every rank, have one group a rank (`groups` None).
    """

    rows: tuple[int, ...]
    groups: int | None = None

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
        groups = self.groups or ranks
        grouped = [each.reshape(groups, each.shape[0] // groups, *each.shape[1:]) for each in whole]
        return torch.cat(grouped, 1).chunk(ranks)[rank].flatten(0, 1)

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        groups = self.groups or len(shares)
        stacked = torch.cat(list(shares))
        grouped = stacked.reshape(groups, stacked.shape[0] // groups, *stacked.shape[1:])
        return [each.flatten(0, 1) for each in torch.split(grouped, [rows // groups for rows in self.rows], 1)]
