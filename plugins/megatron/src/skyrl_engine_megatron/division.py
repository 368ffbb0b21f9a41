"""Divisions of Hugging Face's tensors into ranks' shares of a Megatron parameter, and back; also for gradients and moments."""

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor


class Division(Protocol):
    """The division of one Megatron parameter over tensor-parallel ranks."""

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
        """Return the share of `rank` in Hugging Face's tensors."""

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """Return Hugging Face's tensors, joined from the shares of all ranks."""


@frozen
class Whole:
    """Every rank holds all of one tensor."""

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:  # noqa: ARG002 - a rank holds all of it
        return whole[0]

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        return [shares[0]]


@frozen
class VocabularyRows:
    """Each rank holds consecutive rows of one tensor of `rows` rows, padded with zeros to a multiple of the ranks."""

    rows: int

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
        lacking = -self.rows % ranks
        filled = torch.nn.functional.pad(whole[0], (0, 0, 0, lacking)) if lacking else whole[0]
        return filled.chunk(ranks)[rank]

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shares))[: self.rows]]


@frozen
class Along:
    """Each rank holds an equal part of one tensor along `dimension`; of several `blocks` there (an expert's gate and up), a part of each."""

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
    """Several tensors of `rows` rows in one parameter: each is cut into `groups` groups of rows; first come all first groups, and so on.

    Queries, keys and values are grouped by the key head that queries share (`groups` is the number of key heads). Gate and up, whose halves
    megatron-core keeps apart on every rank, have one group per rank (`groups` None). More ranks than groups share each group's rows.
    """

    rows: tuple[int, ...]
    groups: int | None = None

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
        groups = self.groups or ranks
        grouped = [tensor.reshape(groups, tensor.shape[0] // groups, *tensor.shape[1:]) for tensor in whole]
        return torch.cat(grouped, 1).flatten(0, 1).chunk(ranks)[rank]

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        groups = self.groups or len(shares)
        stacked = torch.cat(list(shares))
        grouped = stacked.reshape(groups, stacked.shape[0] // groups, *stacked.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(grouped, [rows // groups for rows in self.rows], 1)]


@frozen
class Fused:
    """One tensor, in which the tensors of `stacked` lie one after another."""

    stacked: Stacked

    def split(self, whole: Sequence[Tensor], ranks: int, rank: int) -> Tensor:
        return self.stacked.split(torch.split(whole[0], list(self.stacked.rows)), ranks, rank)

    def join(self, shares: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(self.stacked.join(shares))]
