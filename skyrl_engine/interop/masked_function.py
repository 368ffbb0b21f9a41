"""Another engine's loss function with all arguments bound except its mask: it maps the mask values of n tokens to a scalar."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import frozen

from skyrl_engine.errors import ContractError, DataError
from skyrl_engine.interop.arguments import Arguments
from skyrl_engine.interop.rows import PaddedPlaces

if TYPE_CHECKING:
    import torch


@frozen(eq=False)
class MaskedFunction:
    """`function` over the tokens in `rows`, whose `columns` are flat [n] tensors by need.

    `per_sequence` names needs that the function takes as one value per row. `normalised` multiplies the scalar by the sum of the mask,
    which undoes a masked mean. The function draws from the global random state, which is seeded with `seed` and restored afterwards.
    """

    name: str
    function: Callable[..., Any]
    arguments: Arguments
    config: object
    columns: Mapping[str, "torch.Tensor"]
    rows: PaddedPlaces
    per_sequence: tuple[str, ...]
    normalised: bool
    seed: int

    def __call__(
        self, weights: "torch.Tensor", *, more_rows: int = 0, more_columns: int = 0, anchor: float = 0.0, seed: int | None = None
    ) -> tuple["torch.Tensor", tuple[Any, ...]]:
        """Return the scalar for these mask values [n], in a batch with further rows and columns of padding, and the further results.

        With an `anchor` there is one more token, in a row of its own, whose columns are 0 and whose mask value is the anchor; a masked mean
        then stays a mean.
        """
        rows = self.rows.grow(more_rows + bool(anchor), more_columns)
        keywords: dict[str, Any] = {argument: self._argument(need, rows) for argument, need in self.arguments.columns.items()}
        mask = keywords[self.arguments.mask] = rows.pad(weights)
        if anchor:
            mask[-1, 0] = anchor
        if self.arguments.config is not None and self.config is not None:
            keywords[self.arguments.config] = self.config
        keywords |= {option: getattr(self.config, option) for option in self.arguments.options}
        with _seed_globally(self.seed if seed is None else seed, weights.device):
            value, others = _scalar_of(self.name, self.function(**keywords))
        return (value * weights.sum() if self.normalised and not anchor else value), others

    def value(self, weights: "torch.Tensor", **batch: int) -> float:
        """Return the scalar alone, as a number, without building a graph."""
        import torch

        with torch.no_grad():
            return float(self(weights, **batch)[0])

    def _argument(self, need: str, rows: PaddedPlaces) -> "torch.Tensor":
        values = self.columns[need]
        if need not in self.per_sequence:
            return rows.pad(values)
        first = rows.per_row(values)
        differing = values != first[rows.row]
        if bool(differing.any()):
            raise DataError(
                f"{self.name} takes {need} as one value per sequence, and a sequence holds {values[differing][0].item():g} beside "
                f"{first[rows.row][differing][0].item():g}",
                remedy=f"Give every token of a sequence the same {need}, or take it out of per_sequence",
            )
        return first


def _scalar_of(name: str, result: Any) -> tuple["torch.Tensor", tuple[Any, ...]]:
    import torch

    value, *others = result if isinstance(result, tuple | list) and result else (result,)
    if not isinstance(value, torch.Tensor):
        raise ContractError(
            f"{name} returned {type(value).__name__} as its loss",
            remedy="Return a scalar tensor, or a tuple that begins with it",
        )
    if value.numel() != 1:
        raise ContractError(
            f"{name} returned a loss of shape {list(value.shape)}, and masked_loss takes the scalar that is summed over a mask",
            remedy="Let it return (loss * mask).sum(), or write the formula as skyrl_engine.loss, which returns one value per token",
        )
    return value.reshape(()), tuple(others)


@contextmanager
def _seed_globally(seed: int, device: "torch.device") -> Iterator[None]:
    """Seed the global random state inside this context, because other engines' losses draw from it, and restore it afterwards."""
    import torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
