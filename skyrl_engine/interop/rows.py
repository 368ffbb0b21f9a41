"""Lay flat tokens out as padded rows, one sequence per row, and back."""

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.loss import Sequences

if TYPE_CHECKING:
    import torch


@frozen(eq=False)
class PaddedPlaces:
    """The places of n tokens, `row` and `column` int64[n], in a padded batch of S sequences with tokens, the longest of T tokens."""

    row: "torch.Tensor"
    column: "torch.Tensor"
    shape: tuple[int, int]

    @classmethod
    def of(cls, sequences: Sequences) -> "PaddedPlaces":
        """Give each sequence that has a token a row of its own; sequences without tokens get none."""
        import torch

        filled = sequences.counts > 0
        row = (filled.cumsum(0) - 1)[sequences.index]
        places = torch.arange(len(sequences.index), device=sequences.index.device)
        column = places - sequences.offsets[sequences.index]
        return cls(row, column, (int(filled.sum()), int(sequences.counts.max())))

    def grow(self, rows: int = 0, columns: int = 0) -> "PaddedPlaces":
        """Return the same places in a batch with further rows and columns of padding."""
        return evolve(self, shape=(self.shape[0] + rows, self.shape[1] + columns))

    def pad(self, values: "torch.Tensor") -> "torch.Tensor":
        """Return `values` [n] at their places in [S, T], 0 at places without a token; differentiable."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)

    def per_row(self, values: "torch.Tensor") -> "torch.Tensor":
        """Return [S], the first of `values` [n] in each row; 0 for a row without tokens."""
        return self.pad(values)[:, 0]
