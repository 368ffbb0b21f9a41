"""Check that a scalar is linear in its mask, so that its derivative by a token's mask value is that token's loss, or find out why not.

For f(mask) = sum of mask x loss, the loss of a token is df/dmask. Any other f has a derivative too, which is not a token's loss. This module
checks that f is such a sum; if it is not, experiments find the cause, each by an effect that no other cause has.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.loss import Sequences
from skyrl_engine.interop.masked_function import MaskedFunction
from skyrl_engine.interop.rows import PaddedPlaces

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-4
"""Largest difference relative to the sum of absolute values: far above a float32 sum's rounding, far below the effect of one row."""

_ANCHOR = 2.0
_LENGTHS = (5, 4, 3)
_POLICIES = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")
_UNBOUNDED = ("advantages", "values", "old_values", "returns", "rewards")
_NATIVE = "Write the formula as skyrl_engine.loss, which returns one value per token"


@frozen
class Objection:
    """The cause for which a function cannot be used, and its remedy."""

    cause: str
    remedy: str


def token_losses(call: MaskedFunction, *, batch_local: bool) -> "tuple[torch.Tensor, tuple[object, ...], Objection | None]":
    """Return df/dmask [n], the function's further results, and an objection if df/dmask is not the tokens' losses.

    Checks sum(mask * loss) == f(mask) at a mask of ones and, unless `batch_local`, at a mask of other values, zeros among them, in a batch
    with a further row and column of padding. The tensor is 0 if f does not depend on the mask.
    """
    import torch

    ones = _ones(call).requires_grad_()
    with torch.enable_grad():
        value, others = call(ones)
        losses = _of_mean(call) if call.normalised else _gradient(value, ones)
    if losses is None:
        return torch.zeros_like(ones), others, diagnose(call)
    detached = losses.detach()
    if not bool(detached.isfinite().all()):
        # the objective reports values that are not finite
        return losses, others, None
    holds = _close(value.detach(), detached.sum(), detached.abs().sum())
    if holds and not batch_local:
        uneven = _make_uneven_values(call)
        elsewhere = call.value(uneven, more_rows=1, more_columns=1)
        holds = _close(elsewhere, (uneven * detached).sum(), (uneven * detached.abs()).sum())
    return losses, others, None if holds else diagnose(generic(call))


def _of_mean(call: MaskedFunction) -> "torch.Tensor | None":
    """Return the token losses l [n] of the masked mean f = sum(mask * l) / sum(mask), or None if f does not depend on the mask.

    At a mask of ones, df/dmask = (l - f) / n and l = f + n df/dmask, but then rounding would make each token's loss depend on all others. So
    the derivative is taken where every mask value is 0 except that of a further token, the anchor, with value a: there f is the anchor's loss,
    which depends on no other token, and l = f + a df/dmask. The value a = 2 is above denominators that are clamped at 1.
    """
    zeros = (0 * _ones(call)).requires_grad_()
    value, _ = call(zeros, anchor=_ANCHOR)
    gradient = _gradient(value, zeros)
    return None if gradient is None else value + _ANCHOR * gradient


def examine(call: MaskedFunction, *, batch_local: bool) -> Objection | None:
    """Return an objection to the function, if there is one, from a trial in float64 on a few tokens of `call` with changed values.

    Real values may hide a fault: with a ratio of 1 at the first step, a mean over the sequence looks like a constant.
    """
    small = generic(call)
    _, _, objection = token_losses(small, batch_local=batch_local)
    return objection or (diagnose(small) if _has_curvature(small) else None)


def generic(call: MaskedFunction) -> MaskedFunction:
    """Return the function over twelve of the tokens, repeated if there are fewer, in three sequences, in float64.

    Log-probabilities are lowered and unbounded columns shifted by fixed random numbers, so that nothing is equal or 0 by chance; columns
    of unknown meaning keep their values.
    """
    import torch

    device = call.rows.row.device
    count = sum(_LENGTHS)
    row = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS)).to(device)
    generator = torch.Generator().manual_seed(0)
    columns = {}
    for need, values in call.columns.items():
        moved = values.detach()[torch.arange(count, device=device) % len(values)].double()
        noise = torch.rand(count, generator=generator, dtype=torch.float64).to(device)
        if need in _POLICIES:
            moved = moved - 0.05 - 0.5 * noise
        elif need in _UNBOUNDED:
            moved = moved + 4 * noise - 2
        columns[need] = moved
    sequences = Sequences(row, torch.tensor(_LENGTHS, device=device), row[:0], row[:0])
    rows = PaddedPlaces.of(sequences)
    for need in call.per_sequence:
        columns[need] = rows.per_row(columns[need])[row]
    return evolve(call, columns=columns, rows=rows)


def diagnose(call: MaskedFunction) -> Objection:
    """Return the cause, found by experiments on the function."""
    for experiment in (_not_finite, _random, _no_derivative, _check_scaling, _check_padding, _check_unmasked_tokens):
        for finding in experiment(call):
            return finding
    return Objection("is no sum of its mask times one value per token", _NATIVE)


def _not_finite(call: MaskedFunction) -> Iterator[Objection]:
    if not math.isfinite(call.value(_ones(call), more_rows=1, more_columns=1)):
        yield Objection(
            "is not finite where a batch holds padding (mask 0, every column 0)",
            "Mask with torch.where; where it divides by the number of tokens of a row, let it sum, and use the reducer sequence_mean",
        )


def _random(call: MaskedFunction) -> Iterator[Objection]:
    if call.value(_ones(call)) != call.value(_ones(call), seed=call.seed + 1):
        yield Objection(
            "draws random numbers, so its value depends on the shape of the batch",
            "Pass batch_local=True to masked_loss if that is meant; the numbers are then seeded from run, step and samples",
        )


def _no_derivative(call: MaskedFunction) -> Iterator[Objection]:
    """Object to a function without a derivative by its mask: it compares it, converts it to bool, or does not use it."""
    import torch

    ones = _ones(call).requires_grad_()
    with torch.enable_grad():
        if _gradient(call(ones)[0], ones) is not None:
            return
    if _differ(call.value(_ones(call)), call.value(_without_some(call))):
        yield Objection(
            "uses its mask as bool (converted, or compared with a number), so no token's share can be read from it",
            f"Let it multiply by the mask, as in (loss * mask).sum(). Or: {_NATIVE.lower()}",
        )
    else:
        yield Objection("does not use its mask", "Let it multiply by the mask, as in (loss * mask).sum()")


def _check_scaling(call: MaskedFunction) -> Iterator[Objection]:
    """Object if twice the mask does not give twice the value."""
    ones = _ones(call)
    once, twice = call.value(ones), call.value(2 * ones)
    if call.normalised:
        if _differ(twice, 2 * once):
            yield Objection(
                'is no masked mean over all tokens, which is what reduction="token_mean" undoes',
                'Leave reduction at "sum" and let the function reduce by a sum',
            )
    elif not _differ(twice, once):
        first_row = 1 + (call.rows.row == 0).to(ones.dtype)
        if _differ(call.value(first_row), once):
            yield Objection(
                "divides by its own mask (masked mean over all tokens)",
                'Pass reduction="token_mean" to masked_loss, which undoes the division, or set the function\'s own reduction to a sum; '
                "then choose the reducer token_mean",
            )
        else:
            yield Objection(
                "divides by its own mask (masked mean of each sequence)",
                "Set the function's own reduction to a sum, and choose the reducer sequence_mean",
            )
    elif _differ(twice, 2 * once):
        if not _has_curvature(call):
            yield Objection(
                "adds something that its mask does not multiply",
                "Take that out of the function; further terms have a place of their own, [[loss.terms]]",
            )
        else:
            yield Objection(f"is not linear in its mask: twice the mask gives {twice / once:.4g} times the value", _NATIVE)
    if _has_curvature(call):
        yield Objection(
            "uses its mask inside the formula as well (such as a masked mean over the sequence), so that one token's mask value moves the "
            "losses of others",
            f"{_NATIVE}; tokens.sequences has sums and means over sequences",
        )


def _check_padding(call: MaskedFunction) -> Iterator[Objection]:
    """Object if more padding changes the value."""
    ones = _ones(call)
    here = call.value(ones)
    rows = _differ(call.value(ones, more_rows=1), here)
    columns = _differ(call.value(ones, more_columns=1), here)
    if rows and columns:
        yield Objection("takes a mean over all positions, padding included", "Let it sum, and choose the reducer token_mean")
    elif rows:
        yield Objection(
            "uses a mean over rows (divides by their number)",
            "Let it sum over rows, and choose a reducer that averages over sequences",
        )
    elif columns:
        yield Objection(
            "divides by the width of the padded batch",
            "Let it sum, and choose the reducer sequence_mean_token_sum_norm with a fixed length",
        )


def _check_unmasked_tokens(call: MaskedFunction) -> Iterator[Objection]:
    """Object if a token without loss changes the losses of others."""
    import torch

    ones, some = _ones(call).requires_grad_(), _without_some(call).requires_grad_()
    with torch.enable_grad():
        whole, rest = _gradient(call(ones)[0], ones), _gradient(call(some)[0], some)
    if whole is None or rest is None:
        return
    carrying = some.detach() > 0
    rest, whole = rest.detach()[carrying], whole.detach()[carrying]
    if _same(rest, whole * len(carrying) / len(rest)):
        yield Objection(
            "divides by the number of its mask's entries that are not 0",
            "Set the function's own reduction to a sum, and choose the reducer token_mean",
        )
    elif not _same(rest, whole):
        yield Objection(
            "gives a token another loss when other tokens carry none (a selection, a rank or a statistic of the batch)",
            "Pass batch_local=True to masked_loss if that is meant, which declares that the loss depends on how the batch is cut",
        )


def _has_curvature(call: MaskedFunction) -> bool:
    """Return True if the second derivative by the mask is not 0 in a fixed direction."""
    import torch

    ones = _ones(call).requires_grad_()
    with torch.enable_grad():
        first = _gradient(call(ones)[0], ones)
        if first is None or not first.requires_grad:
            return False
        direction = _make_uneven_values(call)
        second = _gradient((first * direction).sum(), ones)
    if second is None:
        return False
    return bool(second.detach().abs().max() > TOLERANCE * first.detach().abs().max())


def _gradient(value: "torch.Tensor", ones: "torch.Tensor") -> "torch.Tensor | None":
    """Return the derivative, itself differentiable, or None if the value does not depend on the mask."""
    import torch

    if not value.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(value, ones, create_graph=True, allow_unused=True)
    return gradient


def _ones(call: MaskedFunction) -> "torch.Tensor":
    """Return ones [n] in the dtype of the columns."""
    import torch

    return torch.ones_like(_first(call.columns), requires_grad=False)


def _make_uneven_values(call: MaskedFunction) -> "torch.Tensor":
    """Return [n] values from 1 to 2, distinct for some hundreds of tokens; with three or more tokens, every third is 0."""
    import torch

    ones = _ones(call)
    places = torch.arange(len(ones), device=ones.device)
    values = 1 + torch.remainder(places * 0.6180339887, 1.0).to(ones.dtype)
    return values.where((places % 3 != 1) | (len(ones) < 3), 0)


def _without_some(call: MaskedFunction) -> "torch.Tensor":
    """Return ones [n]; with three or more tokens, every third is 0."""
    return (_make_uneven_values(call) > 0).to(_first(call.columns).dtype)


def _first(columns: "Mapping[str, torch.Tensor]") -> "torch.Tensor":
    return next(iter(columns.values())).detach()


def _same(one: "torch.Tensor", other: "torch.Tensor") -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * other.abs().max())


def _differ(one: float, other: float) -> bool:
    return not _close(one, other, max(abs(one), abs(other)))


def _close(one: "float | torch.Tensor", other: "float | torch.Tensor", scale: "float | torch.Tensor") -> bool:
    return abs(float(one) - float(other)) <= TOLERANCE * float(scale) + 1e-30
