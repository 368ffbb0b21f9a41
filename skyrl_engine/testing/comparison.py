"""Compare numbers that should be equal: measure their difference, and infer from it the likely cause in the code."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.testing.promise import Broken

Numbers = npt.NDArray[np.float64]

RELATIVE, ABSOLUTE = 1e-7, 1e-9
"""float64 sums in another order differ by so much; a wrong count is off by a factor, never by so little."""


def is_same(one: Numbers, other: Numbers, *, relative: float = RELATIVE, absolute: float = ABSOLUTE) -> bool:
    """Return True where both are equal within the tolerance, elementwise."""
    return bool(np.allclose(one, other, rtol=relative, atol=absolute))


def factor_between(before: Numbers, after: Numbers) -> float | None:
    """Return the single factor from `before` to `after`; None where there is none, or it is 1."""
    if not before.any() or not np.isfinite(after).all():
        return None
    factor = float(before @ after / (before @ before))
    return factor if is_same(factor * before, after) and not is_same(before, after) else None


def format_factor(factor: float | None) -> str:
    """Return a factor in words that follow "changes"; nothing where there is none."""
    if factor is None:
        return ""
    return f" x{factor:.2f}" if f"{factor:.2f}" != "1.00" else f" x{factor:.8g}"


def describe_change(
    noun: str, before: Numbers, after: Numbers, *, relative: float = RELATIVE, absolute: float = ABSOLUTE
) -> tuple[str, float | None]:
    """Say how tokens' numbers differ, in words that follow "it", and by which factor if it is one; `noun` names one number: "loss"."""
    factor = factor_between(before, after)
    if factor is not None:
        return f"changes{format_factor(factor)}", factor
    place = int(np.argmax(~np.isclose(before, after, rtol=relative, atol=absolute)))
    digits = next(digits for digits in (6, 9, 17) if f"{before[place]:.{digits}g}" != f"{after[place]:.{digits}g}" or digits == 17)
    return f"changes: the {noun} of token {place} from {before[place]:.{digits}g} to {after[place]:.{digits}g}", None


def require_same(noun: str, before: Numbers, after: Numbers, when: str, cause: str, remedy: str, **tolerance: float) -> None:
    """Raise Broken unless tokens' numbers are equal; `when` follows "changes ...", as in "under two micro-batches"."""
    if not is_same(before, after, **tolerance):
        how, factor = describe_change(noun, before, after, **tolerance)
        raise Broken(f"{how} {when}: {cause}", remedy, factor=factor)


def cause_of_ratio(before: Numbers, after: Numbers, candidates: Mapping[str, Numbers]) -> str | None:
    """Return the candidates whose numbers equal the factor of every value, joined by "or"; a candidate that predicts no change is left out."""
    nonzero = before != 0
    if not nonzero.any():
        return None
    ratio = after[nonzero] / before[nonzero]
    causes = [
        cause
        for cause, predicted in candidates.items()
        if is_same(ratio, predicted[nonzero]) and not is_same(predicted[nonzero], np.ones_like(ratio))
    ]
    return ", or ".join(causes) or None


def is_constant_within(difference: Numbers, part_of: npt.NDArray[np.int64]) -> bool:
    """Return True where all tokens of each part differ by one number, and some of these numbers are not 0."""
    parts = [difference[part_of == part] for part in np.unique(part_of)]
    return not is_same(difference, np.zeros_like(difference)) and all(is_same(part, np.full_like(part, part[0])) for part in parts)


def excerpts(got: AnyArray, due: AnyArray) -> tuple[str, str]:
    """Return up to eight numbers of both arrays, from the first place on at which their bytes differ, or one of them ends."""
    shorter = min(len(got), len(due))
    place = next((place for place in range(shorter) if got[place].tobytes() != due[place].tobytes()), shorter)
    one, other = (f"{array[place : place + 8].tolist()}{', ...' if len(array) > place + 8 else ''}" for array in (got, due))
    return (one, other) if place == 0 else (f"{one} from place {place} on", other)
