"""Estimate how often one of k attempts at a task succeeds, how often most of them do, and how sure that is.

With c of n attempts right, pass@k = 1 - C(n - c, k) / C(n, k): the share of all sets of k of the n attempts that hold a right one, which
estimates the chance without bias (Chen et al. 2021, arXiv:2107.03374, eq. 1). avg@k is the share of right attempts, which is pass@1.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
_PIECE: Final = 2**20


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """Estimate the chance that one of `k` attempts is right, from `right` of `attempts`. Raises ValueError where k is more than there are."""
    if not 0 <= right <= attempts or not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} of {right} right ones among {attempts} attempts")
    return 1.0 - comb(attempts - right, k) / comb(attempts, k)


def majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Say whether the answer that most attempts gave is right, from (answer, right) of every attempt at a task: 1.0 or 0.0.

    An attempt without an answer has no vote, and no vote at all is wrong. Between answers that are equally common a draw decides, so that the
    share of right ones is returned. Answers are compared without the spaces around them; one is right as often as the attempts that gave it
    (Wang et al. 2022, arXiv:2203.11171).
    """
    right: dict[str, list[bool]] = {}
    for answer, succeeded in votes:
        if answer is not None:
            right.setdefault(answer.strip(), []).append(succeeded)
    counts = Counter({answer: len(votes_for_answer) for answer, votes_for_answer in right.items()})
    most = max(counts.values(), default=0)
    shares = [sum(right[answer]) / count for answer, count in counts.items() if count == most]
    return sum(shares) / len(shares) if shares else 0.0


@frozen
class Estimate:
    """A mean over tasks, and its 95 % interval."""

    mean: float
    low: float
    high: float


def estimate(per_task: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Return the mean over tasks, with the percentile bootstrap interval: tasks are drawn again, attempts of a task stay together."""
    values = np.asarray(per_task, dtype=np.float64)
    if not len(values):
        raise ValueError("no task")
    generator = np.random.Generator(np.random.PCG64(seed))
    means = _resample_means(values, generator, resamples)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(float(values.mean()), float(low), float(high))


def _resample_means(values: npt.NDArray[Any], generator: np.random.Generator, resamples: int) -> npt.NDArray[np.float64]:
    """float64[resamples], computed in pieces of bounded memory."""
    piece = max(1, _PIECE // len(values))
    means = [
        values[generator.integers(len(values), size=(min(piece, resamples - done), len(values)))].mean(axis=1)
        for done in range(0, resamples, piece)
    ]
    return np.concatenate(means)
