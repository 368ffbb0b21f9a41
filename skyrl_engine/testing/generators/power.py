"""Statistical tests of draws: how often each breaks a right generator, and how far off a wrong one is that it shows.

`tests/testing/generators/test_power.py` measures both on the kit's model.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

FALSE_ALARM = 1e-4
"""Probability, at most, that a statistical promise breaks a right generator: of all its tests together."""

MISS = 1e-4
"""Probability, at most, that a test keeps a generator that is as far off as it says that it shows."""

FACTORS = (1 / 2, 2 / 3, 4 / 5, 5 / 4, 3 / 2, 2.0)
"""Draws are compared with those at each of these times the right temperature."""

ODDS = (1 / 2, 2 / 3, 3 / 2, 2.0)
"""Draws are compared with those where the tokens that a row holds have each of these times their odds."""

NORMAL = 4.0
"""By the formula of `largest_chi_square` a right generator breaks one test in 31,600; measured, it is one in 20,000 to 30,000."""

LEAST_DUE = 5
"""Cells of a chi-square test hold at least so many draws that are due; of fewer, its distribution is another."""


# --- counts of draws ---------------------------------------------------------------------------------------------------------------


def largest_chi_square(degrees: int) -> float:
    """Return the chi-square that a right sampler exceeds with probability `FALSE_ALARM` / 2 at most (Wilson and Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + NORMAL * math.sqrt(part)) ** 3)


def _shift_shown(degrees: int) -> float:
    """Return the least shift of the mean of chi-square that brings it above the largest one, but with probability `MISS`."""
    shift = 1.0
    while degrees + shift - largest_chi_square(degrees) < NORMAL * math.sqrt(2 * degrees + 4 * shift):
        shift += 1.0
    return shift


def draws_for(distance: float, cells: int) -> int:
    """Return how many draws show a total variation of `distance` over so many cells, but with probability `MISS`.

    A wrong distribution q adds to the mean n sum (q - p)^2 / p >= n (2 distance)^2 (Cauchy and Schwarz) and to the variance four times that.
    """
    return math.ceil(_shift_shown(cells - 1) / (2 * distance) ** 2)


def distance_shown(draws: int, cells: int) -> float:
    """Return the total variation that so many draws show; see `draws_for`."""
    return math.sqrt(_shift_shown(cells - 1) / draws) / 2


def cells_of(due: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return the cell of each outcome, int64[n], of which `due` float64[n] draws are due: neighbours share one until `LEAST_DUE` are."""
    cells, last, cell_due = np.zeros(len(due), dtype=np.int64), 0, 0.0
    for outcome, outcome_due in enumerate(due):
        cells[outcome], cell_due = last, cell_due + outcome_due
        if cell_due >= LEAST_DUE:
            last, cell_due = last + 1, 0.0
    return np.minimum(cells, max(last - 1, 0))


@frozen(eq=False)
class ChiSquare:
    """The chi-square of counts: `counts` and `due` float64[cells], and the `largest` that chance explains."""

    value: float
    largest: float
    counts: npt.NDArray[np.float64]
    due: npt.NDArray[np.float64]

    @classmethod
    def of(cls, outcomes: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> "ChiSquare":
        """Compare outcomes int64[draws] with the probabilities float64[n] of outcomes 0 to n - 1."""
        outcome_due = probabilities * len(outcomes)
        cells = cells_of(outcome_due)
        counts = np.bincount(cells, weights=np.bincount(outcomes, minlength=len(outcome_due))).astype(np.float64)
        due = np.bincount(cells, weights=outcome_due).astype(np.float64)
        value = float(((counts - due) ** 2 / due).sum())
        return cls(value, largest_chi_square(len(due) - 1) if len(due) > 1 else math.inf, counts, due)

    @property
    def worst(self) -> int:
        """The cell that adds most."""
        return int(np.argmax((self.counts - self.due) ** 2 / self.due))


# --- temperatures ------------------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Temperatures:
    """The likelihood of `count` draws at the temperatures `FACTORS` times the right one, against that at the right one.

    `gains` float64[factors] are the logarithms of the ratios, and `distances` the mean total variations between the distributions.
    """

    count: int
    gains: npt.NDArray[np.float64]
    distances: npt.NDArray[np.float64]

    @classmethod
    def of(cls, due: Sequence[npt.NDArray[np.float64]], tokens: Sequence[npt.NDArray[np.int32]]) -> "Temperatures":
        """Compare log-probabilities float64[n, vocabulary] at the right temperature, by request, with the tokens int32[n] drawn there."""
        rows, drawn = np.concatenate(due), np.concatenate(tokens)
        places = np.arange(len(drawn))
        gains, distances = [], []
        for factor in FACTORS:
            other = scale_to_temperature(rows, factor)
            gains.append((other - rows)[places, drawn].sum())
            distances.append(np.abs(np.exp(other) - np.exp(rows)).sum(-1).mean() / 2)
        return cls(len(drawn), np.array(gains), np.array(distances))

    @property
    def evidence(self) -> float:
        """The logarithm of the mean likelihood ratio over all factors; see `mean_ratio`."""
        return mean_ratio(self.gains)

    @property
    def likeliest(self) -> int:
        """The place of the factor at which the draws are likeliest."""
        return int(np.argmax(self.gains))


def scale_to_temperature(logprobs: npt.NDArray[np.float64], factor: float) -> npt.NDArray[np.float64]:
    """Return log-probabilities [n, vocabulary] at `factor` times their temperature."""
    scaled = logprobs / factor
    scaled -= scaled.max(-1, keepdims=True)
    return np.asarray(scaled - np.log(np.exp(scaled).sum(-1, keepdims=True)))


def mean_ratio(gains: npt.NDArray[np.float64]) -> float:
    """Return the logarithm of the mean of likelihood ratios, given as logarithms.

    The mean ratio of a right generator's draws is 1 on average, whatever the model is, so that it is x or more with probability 1/x at
    most (Markov): that is exact, for any number of draws.
    """
    highest = float(gains.max())
    return highest + math.log(float(np.exp(gains - highest).mean()))


@frozen(eq=False)
class Repeats:
    """The likelihood of draws where tokens that the row holds have `ODDS` times their odds, against that at equal odds.

    `gains` float64[odds] are the logarithms of the ratios. `count` of all `draws` are of tokens that the row held; `due` are due.
    """

    count: int
    draws: int
    due: float
    gains: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls,
        due: Sequence[npt.NDArray[np.float64]],
        tokens: Sequence[npt.NDArray[np.int32]],
        prompts: Sequence[npt.NDArray[np.int32]],
    ) -> "Repeats":
        """Take log-probabilities float64[n, vocabulary], by request, the tokens int32[n] drawn there, and the prompts before them."""
        masses, repeats = [], []
        for rows, drawn, prompt in zip(due, tokens, prompts, strict=True):
            held = np.zeros(rows.shape, dtype=bool)
            held[:, prompt] = True
            for place, token in enumerate(drawn):
                held[place + 1 :, token] = True
            masses.append((np.exp(rows) * held).sum(-1))
            repeats.append(held[np.arange(len(drawn)), drawn])
        mass, repeated = np.concatenate(masses), np.concatenate(repeats)
        gains = [np.log(odds) * repeated.sum() - np.log1p((odds - 1) * mass).sum() for odds in ODDS]
        return cls(int(repeated.sum()), len(mass), float(mass.sum()), np.array(gains))

    @property
    def evidence(self) -> float:
        """The logarithm of the mean likelihood ratio over all odds; see `mean_ratio`."""
        return mean_ratio(self.gains)


# --- places in a distribution ------------------------------------------------------------------------------------------------------


def largest_step(draws: int, tests: int) -> float:
    """Return the largest distance of an empirical distribution from its own that one of `tests` right samplers' shows: once in 1/`FALSE_ALARM`.

    The inequality of Dvoretzky, Kiefer and Wolfowitz with the constant of Massart (1990): exact for any number of draws.
    """
    return math.sqrt(math.log(2 * tests / FALSE_ALARM) / (2 * draws))


def step_shown(draws: int, tests: int) -> float:
    """Return the largest distance (Kolmogorov and Smirnov's) that so many draws show, but with probability `MISS` (Hoeffding)."""
    return largest_step(draws, tests) + math.sqrt(math.log(1 / MISS) / (2 * draws))


def distance_from_uniform(places: npt.NDArray[np.float64]) -> float:
    """Return the largest distance of the empirical distribution of numbers in [0, 1] from the uniform one."""
    ordered, count = np.sort(places), len(places)
    steps = np.arange(count + 1) / count
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))
