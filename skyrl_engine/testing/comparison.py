"""Numbers that should be equal and are not: by how much, and what that gives away about the code that made them."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from skyrl_engine.testing.promise import Broken
from skyrl_engine.testing.tokens.evaluation import Evaluation

Numbers = npt.NDArray[np.float64]

RELATIVE, ABSOLUTE = 1e-7, 1e-9
"""What float64 leaves room for where sums are taken in another order; a wrong count is off by a factor, never by so little."""


def same(one: Numbers, other: Numbers, *, relative: float = RELATIVE, absolute: float = ABSOLUTE) -> bool:
    """Equal within the tolerance, elementwise."""
    return bool(np.allclose(one, other, rtol=relative, atol=absolute))


def same_evaluation(one: Evaluation, other: Evaluation, **tolerance: float) -> bool:
    """Token losses, total and gradients are equal."""
    return (
        same(one.token_loss, other.token_loss, **tolerance)
        and same(np.array([one.total]), np.array([other.total]), **tolerance)
        and all(same(gradient, other.gradients[name], **tolerance) for name, gradient in one.gradients.items())
    )


def factor_between(before: Numbers, after: Numbers) -> float | None:
    """The one number that `before` is multiplied by to give `after`; None where there is none, or it is 1."""
    if not before.any() or not np.isfinite(after).all():
        return None
    factor = float(before @ after / (before @ before))
    return factor if same(factor * before, after) and not same(before, after) else None


def change(one: Evaluation, other: Evaluation) -> tuple[str, float | None]:
    """How `other` differs from `one`, in words that follow "it ..." or a noun, and the factor if it is one."""
    if same(one.token_loss, other.token_loss):
        name = next((name for name, gradient in one.gradients.items() if not same(gradient, other.gradients[name])), "logprobs")
        return f"the gradient by {name} changes{_times(factor_between(one.gradients[name], other.gradients[name]))}", None
    factor = factor_between(one.token_loss, other.token_loss)
    if factor is not None:
        return f"changes{_times(factor)}", factor
    place = int(np.argmax(~np.isclose(one.token_loss, other.token_loss, rtol=RELATIVE, atol=ABSOLUTE)))
    return f"changes: the loss of token {place} from {one.token_loss[place]:.6g} to {other.token_loss[place]:.6g}", None


def _times(factor: float | None) -> str:
    return "" if factor is None else f" x{factor:.2f}"


def cause_of_ratio(before: Numbers, after: Numbers, candidates: Mapping[str, Numbers]) -> str | None:
    """The candidates by whose numbers every value is multiplied, joined by "or"; one that predicts no change at all explains none."""
    told = before != 0
    if not told.any():
        return None
    ratio = after[told] / before[told]
    found = [
        cause
        for cause, predicted in candidates.items()
        if same(ratio, predicted[told]) and not same(predicted[told], np.ones_like(ratio))
    ]
    return ", or ".join(found) or None


def constant_within(difference: Numbers, part_of: npt.NDArray[np.int64]) -> bool:
    """Whether tokens of one part all differ by the same number, and not all by none."""
    parts = [difference[part_of == part] for part in np.unique(part_of)]
    return not same(difference, np.zeros_like(difference)) and all(same(part, np.full_like(part, part[0])) for part in parts)


def require_same(one: Evaluation, other: Evaluation, when: str, cause: str, remedy: str) -> None:
    """Raise Broken unless both are equal; `when` follows "changes ...", as in "under two micro-batches"."""
    if same_evaluation(one, other):
        return
    how, factor = change(one, other)
    raise Broken(f"{how} {when}: {cause}", remedy, factor=factor)
