"""Parameters of a model by place and size, as the arithmetic of memory reads them. No torch."""

from collections.abc import Iterable
from typing import Literal

from attrs import frozen

Place = Literal["embedding", "before", "layer", "after", "head"]
"""Part of a model: the input embedding, what else comes before the layers (such as a vision tower), a layer, a final norm, the output head."""


@frozen
class ParameterShape:
    """One parameter of `count` numbers. `rows` and `columns` are those of a matrix, whose further dimensions are rows; a vector has one row.

    `layer` counts from 0 in the place "layer". `is_tied` says, of the head, that its numbers are those of the embedding. `held_bytes` are those
    of a parameter in a form of its own, which every rank holds whole; None: its numbers are held in a precision of the model.
    """

    name: str
    place: Place
    rows: int
    columns: int
    layer: int = 0
    is_matrix: bool = True
    is_trained: bool = True
    is_tied: bool = False
    held_bytes: int | None = None

    @property
    def count(self) -> int:
        return self.rows * self.columns


def count_numbers(parameters: Iterable[ParameterShape], *, trained: bool = False) -> int:
    """Count the numbers of parameters, tied ones once; with `trained`, of those alone that are trained."""
    return sum(each.count for each in parameters if not each.is_tied and (each.is_trained or not trained))
