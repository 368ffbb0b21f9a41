"""Two passes over one batch, compared: loss, gradient per parameter, per-token outputs."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.contracts.outputs import BatchOutput

Gradients = Mapping[str, npt.NDArray[np.floating]]


@frozen(eq=False)
class Measured:
    """One pass. `magnitude` is the sum of |weight * term| over all tokens, by which losses are compared: a loss may be 0 by cancellation."""

    loss: float
    magnitude: float
    gradients: Gradients
    output: BatchOutput


@frozen
class Difference:
    """How far a pass is from the reference.

    `loss` is relative to the reference's magnitude, `gradient` the worst ||g - g'|| / ||g'|| of any parameter, `parameter` its name,
    `tokens` the largest difference of a token's loss.
    """

    loss: float
    gradient: float
    parameter: str
    tokens: float

    def within(self, tolerance: float) -> bool:
        return max(self.loss, self.gradient) <= tolerance


def compare(got: Measured, expected: Measured) -> Difference:
    """`expected` is the reference. A parameter without gradient has the gradient 0."""
    names = [*expected.gradients, *(name for name in got.gradients if name not in expected.gradients)]
    nothing = np.zeros(1)
    worst, parameter = max(
        (_relative(got.gradients.get(name, nothing), expected.gradients.get(name, nothing)), name) for name in names
    )
    return Difference(
        loss=abs(got.loss - expected.loss) / max(abs(expected.loss), expected.magnitude, 1e-300),
        gradient=worst,
        parameter=parameter,
        tokens=_token_difference(got.output, expected.output),
    )


def _relative(got: npt.NDArray[np.floating], wanted: npt.NDArray[np.floating]) -> float:
    difference = float(np.linalg.norm(got.astype(np.float64) - wanted))
    norm = float(np.linalg.norm(wanted.astype(np.float64)))
    return difference / norm if norm else (0.0 if difference == 0.0 else float("inf"))


def _token_difference(got: BatchOutput, wanted: BatchOutput) -> float:
    ours, theirs = got.on_actions("token_loss"), wanted.on_actions("token_loss")
    place = {int(sample): row for row, sample in enumerate(got.sample_ids)}
    return max(
        (float(np.abs(ours[place[int(sample)]] - theirs[row]).max(initial=0.0)) for row, sample in enumerate(wanted.sample_ids)),
        default=0.0,
    )
