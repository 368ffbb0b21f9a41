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
        batch = tokens.for_correction(step.label, step.product.needs, index, keep)
        with blame(step.owner, "its call"):
            returned = step.product(batch)
        before = len(batch.sequences.index)
        refuse_other_than_factors(step.label, returned, before)
        returned = returned.to(factors)
        factors[keep] *= returned
        nonzero, total = torch.stack([torch.count_nonzero(returned).to(returned), returned.sum()]).tolist()
        metrics[f"corrections/{step.name}/kept"] = Metric.mean(nonzero, before)
        metrics[f"corrections/{step.name}/factor"] = Metric.mean(total, nonzero)
    return factors, metrics


def refuse_other_than_factors(label: str, value: object, count: int) -> None:
    remedy = "Return one finite factor of 0 or more per token: 0 drops it, 1 leaves it as it is"
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool or value.is_complex() or tuple(value.shape) != (count,):
        got = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__qualname__}"
        raise ResultError(f"{label} returned {got} for {count} tokens", remedy=remedy)
    if not bool(((value >= 0) & value.isfinite()).all()):
        place = int(torch.argmin(((value >= 0) & value.isfinite()).int()))
        raise ResultError(f"{label} returned the factor {value[place].item()} for token {place} of {count}", remedy=remedy)
