"""Corrections in their order, as one factor per token: each is given the tokens that those before it left over."""

from collections.abc import Sequence

import torch

from skyrl_engine.contracts.kinds.correction import Correction
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.errors import ResultError
from skyrl_engine.objective.tokens import MicroBatchTokens
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame


@torch.no_grad()
def correct(
    steps: Sequence[BoundPlugin[Correction]], tokens: MicroBatchTokens, first_index: int
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The product of all factors, [n] without gradient, and per correction the share of tokens it kept and the mean factor of those.

    `first_index` is the first correction's index in the objective, for generators. Raises ResultError for what is no factor per token.
    """
    factors = torch.ones_like(tokens.like)
    metrics: dict[str, Metric] = {}
    for index, step in enumerate(steps, start=first_index):
        keep = factors != 0
        given = tokens.for_correction(step.label, step.product.needs, index, keep)
        with blame(step.owner, "its call"):
            made = step.product(given)
        before = len(given.sequences.index)
        refuse_other_than_factors(step.label, made, before)
        made = made.to(factors)
        factors[keep] *= made
        kept, total = torch.stack([torch.count_nonzero(made).to(made), made.sum()]).tolist()
        metrics[f"corrections/{step.name}/kept"] = Metric.mean(kept, before)
        metrics[f"corrections/{step.name}/factor"] = Metric.mean(total, kept)
    return factors, metrics


def refuse_other_than_factors(label: str, made: object, count: int) -> None:
    remedy = "Return one finite factor of 0 or more per token: 0 drops it, 1 leaves it as it is"
    if not isinstance(made, torch.Tensor) or made.dtype == torch.bool or made.is_complex() or tuple(made.shape) != (count,):
        got = f"{made.dtype} of shape {list(made.shape)}" if isinstance(made, torch.Tensor) else f"a {type(made).__qualname__}"
        raise ResultError(f"{label} returned {got} for {count} tokens", remedy=remedy)
    if not bool(((made >= 0) & made.isfinite()).all()):
        place = int(torch.argmin(((made >= 0) & made.isfinite()).int()))
        raise ResultError(f"{label} returned the factor {made[place].item()} for token {place} of {count}", remedy=remedy)
