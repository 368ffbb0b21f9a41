"""Corrections in their order, as one factor per token: each is given the tokens that those before it left over."""

from collections.abc import Sequence

import torch

from skyrl_engine.contracts.kinds.correction import Correction
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.errors import ResultError
from skyrl_engine.objective.behind import Later
from skyrl_engine.objective.tokens import MicroBatchTokens
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame


@torch.no_grad()
def correct(
    steps: Sequence[BoundPlugin[Correction]], tokens: MicroBatchTokens, later: Later, first_index: int
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The product of all factors, [n] without gradient, and per correction the share of tokens it kept and the mean factor of those.

    `first_index` is the first correction's index in the objective, for generators. Raises ResultError for what is no factor per token: for
    another form or number at once, for numbers that are no factors when `later` is read.

    The host does not wait for the first correction. It waits once before each further one: how many tokens those before it left over is
    a number of the device.
    """
    factors = torch.ones_like(tokens.like)
    metrics: dict[str, Metric] = {}
    for index, step in enumerate(steps, start=first_index):
        kept = None if index == first_index else factors.nonzero().squeeze(1)
        batch = tokens.for_correction(step.label, step.product.needs, index, kept)
        with blame(step.owner, "its call"):
            returned = step.product(batch)
        before = len(batch.sequences.index)
        refuse_other_than_factors(step.label, returned, before, later)
        returned = returned.to(factors)
        factors = factors * returned if kept is None else factors.index_copy(0, kept, factors.index_select(0, kept) * returned)
        nonzero = torch.count_nonzero(returned)
        metrics[f"corrections/{step.name}/kept"] = Metric.mean(nonzero, before)
        metrics[f"corrections/{step.name}/factor"] = Metric.mean(returned.sum(), nonzero)
    return factors, metrics


def refuse_other_than_factors(label: str, value: object, count: int, later: Later) -> None:
    """Raise ResultError for what is no tensor of `count` numbers, and let `later` raise one that names a token whose factor is none."""
    remedy = "Return one finite factor of 0 or more per token: 0 drops it, 1 leaves it as it is"
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool or value.is_complex() or tuple(value.shape) != (count,):
        got = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__qualname__}"
        raise ResultError(f"{label} returned {got} for {count} tokens", remedy=remedy)
    if not count:
        return
    good = (value >= 0) & value.isfinite()
    place = good.int().argmin()
    first_bad = value.index_select(0, place[None])[0]

    def refuse(numbers: Sequence[float]) -> None:
        all_good, token, factor = numbers
        if not all_good:
            raise ResultError(f"{label} returned the factor {factor} for token {int(token)} of {count}", remedy=remedy)

    later.check((good.all(), place, first_bad), refuse)
