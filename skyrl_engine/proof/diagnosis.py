"""Why a gradient is wrong: how often each part of the objective, or each sample, was counted in it, and which number that is.

The gradient is linear in weights and coefficients. So a wrong one that is made of right pieces is a sum of those pieces, each times a
factor, and least squares finds the factors.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.proof.comparison import Gradients, not_finite
from skyrl_engine.proof.plants import Cut

Factors = npt.NDArray[np.float64]

EXACT = 1e-3
"""Relative distance within which a factor is said to be a number."""


@frozen(eq=False)
class Pieces:
    """Gradients that add up to the right one, by the name of what they belong to; `shares` float64[pieces] are their parts of the weights."""

    names: Sequence[str]
    gradients: Sequence[Gradients]
    shares: npt.NDArray[np.float64]

    def fit(self, gradients: Gradients) -> tuple[Factors, float]:
        """The factor of every piece, and the part of `gradients` that no factors explain, relative. Pieces without gradient get 1."""
        wanted = flat(gradients)
        matrix = np.stack([flat(piece) for piece in self.gradients])
        carrying = np.linalg.norm(matrix, axis=1) > 0
        factors = np.ones(len(matrix))
        factors[carrying] = np.linalg.lstsq(matrix[carrying].T, wanted, rcond=None)[0]
        norm = float(np.linalg.norm(wanted))
        return factors, float(np.linalg.norm(wanted - factors @ matrix)) / norm if norm else 0.0


def explain(gradients: Gradients, parts: Pieces, samples: Pieces, cut: Cut, tolerance: float) -> str:
    """One sentence on what is wrong with `gradients`."""
    if wrong := not_finite(gradients):
        others = {1: "", 2: ", nor is another"}.get(len(wrong), f", nor are {len(wrong) - 1} others")
        return f"the gradient of {wrong[0]} is not finite{others}"
    factors, residue = parts.fit(gradients)
    if residue <= tolerance and not _are_alike(factors):
        return "; ".join(
            f"{name} counts {in_words(factor, cut.facts)}"
            for name, factor in zip(parts.names, factors, strict=True)
            if _differs(factor)
        )
    factors, residue = samples.fit(gradients)
    mean = float(np.average(factors, weights=samples.shares))
    text = f"gradient {in_words(mean, cut.facts)}"  # the mean over what samples weigh: exactly the number of means that were summed
    if residue > tolerance:
        return f"{text}, and {residue:.0%} of it is no multiple of any sample's"
    carrying = samples.shares > 0
    if _are_alike(factors[carrying]):
        return text
    place = {int(sample): position for position, sample in enumerate(cut.structure.sample_ids)}
    rank = np.array([cut.rank[place[int(name)]] for name in samples.names])
    lost = [number for number in range(cut.ranks) if np.abs(factors[(rank == number) & carrying]).max(initial=0.0) < EXACT]
    if lost:
        text = f"gradient {in_words(mean, {name: value for name, value in cut.facts.items() if 'share' in name})}"
        return f"{text}: samples of rank {', '.join(map(str, lost))} count for nothing"
    return f"{text}: samples count from x{factors[carrying].min():z.2f} to x{factors[carrying].max():z.2f}"


def in_words(factor: float, known: Mapping[str, float]) -> str:
    """A factor with its names: "x4.00 = number of micro-batches", "x0.50 = 1 / number of ranks", or only the factor."""
    names = [
        f" = {inverse}{name}"
        for name, value in known.items()
        for inverse, meant in (("", value), ("1 / ", 1 / value if value else 0.0))
        if abs(factor - meant) <= EXACT * meant
    ]
    return f"x{factor:.2f}{names[0] if names and _differs(factor) else ''}"


def _differs(factor: float) -> bool:
    return abs(factor - 1) > EXACT


def _are_alike(factors: Factors) -> bool:
    return bool(np.ptp(factors) <= EXACT * max(1.0, float(np.abs(factors).max(initial=0.0))))


def flat(gradients: Gradients) -> npt.NDArray[np.float64]:
    """All parameters' gradients in one row, by the order of their names."""
    return np.concatenate([gradients[name].astype(np.float64).ravel() for name in sorted(gradients)])
