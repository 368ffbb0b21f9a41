"""Two passes over one batch, compared: loss, gradient per parameter, per-token outputs."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.values.outputs import BatchOutput

Gradients = Mapping[str, npt.NDArray[np.floating]]


@frozen(eq=False)
class Measurement:
    """One pass. `magnitude` is the sum of |weight * term| over all tokens, by which losses are compared: a loss may be 0 by cancellation."""

    loss: float
    magnitude: float
    gradients: Gradients
    output: BatchOutput


@frozen
class Difference:
    """The distance of a pass from the reference; infinite where a number is not finite.

    `loss` is relative to the reference's magnitude, `gradient` the worst ||g - g'|| / ||g'|| of any parameter, `parameter` its name,
    `tokens` the largest difference of a token's loss.
    """

    loss: float
    gradient: float
    parameter: str
    tokens: float

    def is_within(self, tolerance: float) -> bool:
        return max(self.loss, self.gradient) <= tolerance


def compare(got: Measurement, expected: Measurement) -> Difference:
    """`expected` is the reference. A parameter without gradient has the gradient 0."""
    ours, theirs = got.gradients, expected.gradients
    expected_gradients = {**{name: np.zeros_like(ours[name]) for name in ours if name not in theirs}, **theirs}
    worst, parameter = max(
        (relative_difference(ours.get(name, np.zeros_like(expected_gradients[name])), expected_gradients[name]), name)
        for name in expected_gradients
    )
    return Difference(
        loss=finite_or_infinite(abs(got.loss - expected.loss) / max(abs(expected.loss), expected.magnitude, 1e-300)),
        gradient=worst,
        parameter=parameter,
        tokens=_token_difference(got.output, expected.output),
    )


def relative_difference(actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    """||actual - expected|| / ||expected||. Infinite where shapes differ, a number is not finite, or `expected` alone is 0."""
    if actual.shape != expected.shape or not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return math.inf
    difference = float(np.linalg.norm(actual.astype(np.float64) - expected))
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    return difference / norm if norm else (0.0 if difference == 0.0 else math.inf)


def finite_or_infinite(difference: float) -> float:
    """The difference; infinity for NaN, which compares as if it were none."""
    return difference if math.isfinite(difference) else math.inf


def not_finite(gradients: Gradients) -> list[str]:
    """The parameters with a gradient that is not finite."""
    return [name for name, gradient in gradients.items() if not np.isfinite(gradient).all()]


def _token_difference(got: BatchOutput, wanted: BatchOutput) -> float:
    ours, theirs = got.on_actions("token_loss"), wanted.on_actions("token_loss")
    place = {int(sample): row for row, sample in enumerate(got.sample_ids)}
    return max(
        (
            finite_or_infinite(float(np.abs(ours[place[int(sample)]] - theirs[row]).max(initial=0.0)))
            for row, sample in enumerate(wanted.sample_ids)
        ),
        default=0.0,
    )
