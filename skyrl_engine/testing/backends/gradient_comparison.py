"""Compare gradients and weights that should be equal: report the factor between them and its likely cause, or the wrong parameters."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from skyrl_engine.proof.comparison import relative_difference
from skyrl_engine.proof.diagnosis import EXACT, Pieces, flat, in_words
from skyrl_engine.testing.backends.held_backend import Arrays
from skyrl_engine.testing.promise import Broken, Undecidable

TOLERANCE = 1e-5
"""Largest ||g - g'|| / ||g'|| of a parameter that float32 explains: sums of some thousand products, taken in another order."""


def norm_of(gradients: Mapping[str, npt.NDArray[np.floating]]) -> float:
    """Return the 2-norm over all parameters, in float64."""
    return float(np.linalg.norm(flat(gradients)))


def sum_gradients(*parts: Arrays) -> Arrays:
    """Return the sum of gradients by name; a parameter without a gradient counts as 0."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.sum([part[name].astype(np.float64) for part in parts if name in part], axis=0) for name in names}


def require_same_gradients(
    got: Arrays, due: Arrays, when: str, remedy: str, *, facts: Mapping[str, float], pieces: Mapping[str, Arrays] | None = None
) -> None:
    """Raise Broken unless every parameter's gradient is the due one; `when` follows "the gradient is x0.50 ...".

    `facts` names numbers that a factor may equal; `pieces` are named parts of the right gradient, of which a missing one is reported.
    Raises Undecidable where the parameter names differ, which another promise covers.
    """
    if got.keys() != due.keys():
        raise Undecidable(
            f"the gradients are not those of the model's parameters: {', '.join(sorted(got.keys() ^ due.keys())[:3])}"
        )
    relative = {name: relative_difference(got[name], expected) for name, expected in due.items()}
    if max(relative.values()) <= TOLERANCE:
        return
    for name, expected in due.items():
        if got[name].shape != expected.shape:
            raise Broken(f"the gradient of {name} has the shape {got[name].shape}, the parameter {expected.shape}", remedy)
        if not np.isfinite(got[name]).all():
            raise Broken(f"the gradient of {name} is not finite", remedy)
    flat_gradient, expected = flat(got), flat(due)
    factor = float(flat_gradient @ expected / (expected @ expected))
    if np.linalg.norm(flat_gradient - factor * expected) <= EXACT * np.linalg.norm(flat_gradient):
        raise Broken(f"the gradient is {in_words(factor, facts)} {when}", remedy, factor=factor)
    if pieces is not None and (lost := _find_lost_pieces(got, pieces)):
        raise Broken(f"{' and '.join(lost)} {'counts' if len(lost) == 1 else 'count'} for nothing in the gradient {when}", remedy)
    wrong = sorted((name for name in relative if relative[name] > TOLERANCE), key=lambda name: -relative[name])
    raise Broken(
        f"the gradient of {len(wrong)} of {len(due)} parameters is not that {when}: of {wrong[0]} by {relative[wrong[0]]:.1e}",
        f"{remedy}; skyrl-engine diff-backends shows every parameter",
    )


def _find_lost_pieces(got: Arrays, pieces: Mapping[str, Arrays]) -> Sequence[str]:
    names = list(pieces)
    factors, residue = Pieces(names, list(pieces.values()), np.ones(len(names))).fit(got)
    return [name for name, factor in zip(names, factors, strict=True) if abs(factor) < EXACT] if residue < EXACT else []


def require_same_weights(got: Arrays, due: Arrays, whose: str, remedy: str) -> None:
    """Raise Broken unless weights are, bit for bit, those that were learned alone; `whose` is as in "of the first model"."""
    wrong = [name for name, weight in due.items() if name not in got or not np.array_equal(got[name], weight)]
    if wrong:
        message = f"{whose}, {wrong[0]} is another one at the end than it is alone ({len(wrong)} such tensors)"
        raise Broken(message, remedy)
