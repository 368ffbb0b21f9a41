"""Flat tokens as padded rows, one sequence a row, and back."""

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.loss import Sequences

if TYPE_CHECKING:
    import torch


@frozen(eq=False)
class Rows:
    """Places of n tokens in a padded batch [S, T]: S sequences that have tokens, T the longest; `row` and `column` int64[n]."""

    row: "torch.Tensor"
    column: "torch.Tensor"
    shape: tuple[int, int]

    @classmethod
    def of(cls, sequences: Sequences) -> "Rows":
        """A row per sequence that has a token; a sequence without any has nothing to say."""
        import torch

        filled = sequences.counts > 0
        row = (filled.cumsum(0) - 1)[sequences.index]
        places = torch.arange(len(sequences.index), device=sequences.index.device)
        column = places - sequences.offsets[sequences.index]
        return cls(row, column, (int(filled.sum()), int(sequences.counts.max())))

    def grown(self, rows: int = 0, columns: int = 0) -> "Rows":
        """The same places in a batch with so many further rows and columns, which stay padding."""
        return evolve(self, shape=(self.shape[0] + rows, self.shape[1] + columns))

    def pad(self, values: "torch.Tensor") -> "torch.Tensor":
        """[S, T] of `values` [n], 0 where there is no token; differentiable."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)

    def per_row(self, values: "torch.Tensor") -> "torch.Tensor":
        """[S] of `values` [n]: each row's first; 0 for a row without tokens."""
        return self.pad(values)[:, 0]
