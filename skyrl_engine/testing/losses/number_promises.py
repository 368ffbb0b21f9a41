"""Promises of a loss about its numbers: the gradient is that of its values, in every precision, and both scale as declared."""

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from attrs import frozen
from hypothesis import strategies as st

from skyrl_engine.testing.comparison import is_same
from skyrl_engine.testing.losses.evaluation import leaves_of
from skyrl_engine.testing.losses.finite_differences import RecordingDetached, ReplayingDetached
from skyrl_engine.testing.losses.kind import LOSS, batch_local
from skyrl_engine.testing.promise import Broken, Undecidable, any_of, promise
from skyrl_engine.testing.subject import Subject
from skyrl_engine.testing.tokens import rollouts
from skyrl_engine.testing.tokens.evaluation import Evaluation, columns_of, is_same_evaluation
from skyrl_engine.testing.tokens.kind import draw_cuts, draw_ordinary, list_cuts, needs_of
from skyrl_engine.testing.tokens.lossy_casts import LossyCasts
from skyrl_engine.testing.tokens.token_batches import CutBatch, TokenBatch


def _exempt_surrogate(subject: Subject[Any]) -> str | None:
    return "the suite declares a surrogate gradient" if "surrogate_gradient" in subject.flags else None


@promise(
    "Its gradient is the derivative of its values, with what it detaches held fixed (central and one-sided differences in float64)",
    cases=lambda subject: rollouts.draw_batches(needs_of(subject), max_sequences=2),
    exempt=_exempt_surrogate,
    effort=0.5,
)
def gradient(subject: Subject[Any], batch: TokenBatch) -> None:
    recording = RecordingDetached()
    base = LOSS.evaluate_or_undecidable(subject, batch, mode=recording)
    if base.dtype != torch.float64:
        raise Undecidable("the loss does not compute in float64")
    scale = 1.0 + max(float(np.abs(array).max(initial=0)) for array in base.gradients.values())
    for name, gradients in base.gradients.items():
        for place in range(batch.tokens):
            left, right = (_slope(subject, batch, recording, name, place, step, base.total) for step in (-_STEP, _STEP))
            if abs(left - right) > _JUMP:
                continue  # a jump is no place to differentiate at
            low, high = min(left, right) - _SLACK * scale, max(left, right) + _SLACK * scale
            got = float(gradients[place])
            if not low <= got <= high:  # at a kink any slope between the two sides will do
                LOSS.require_repeatable(subject, batch)
                if left == right == 0:
                    raise Broken(
                        f"has the gradient {got:.6g} by {name} at token {place} although its values do not move: something is rounded, or "
                        "differentiated by hand",
                        "Cast nothing to half precision or to whole numbers, and let a backward of your own be 0 where a bound holds",
                    )
                middle = (left + right) / 2
                factor = got / middle if abs(middle) > _SLACK * scale else None
                raise Broken(
                    f"the gradient by {name} at token {place} is {got:.6g} where the values have the slope {middle:.6g}",
                    "Check what is detached, written in place, or differentiated by hand",
                    factor=factor,
                )


_STEP, _SLACK, _JUMP = 1e-6, 1e-4, 1e2


def _slope(
    subject: Subject[Any], batch: TokenBatch, recorded: RecordingDetached, name: str, place: int, step: float, base: float
) -> float:
    loss = subject.make()
    leaves = leaves_of(batch, loss, torch.float64, gradients=False)
    columns = {column_name: column for score, leaf in leaves.items() for column_name, column in columns_of(score, leaf).items()}
    columns[name][place] += step
    return (recorded.total(subject.label, loss, batch, leaves, ReplayingDetached(recorded)) - base) / step


def _of_every_precision(subject: Subject[Any]) -> st.SearchStrategy[TokenBatch]:
    ranges: tuple[rollouts.Range, ...] = ("ordinary", "rounded")
    return st.sampled_from(ranges).flatmap(lambda range_: rollouts.draw_batches(needs_of(subject), range_=range_, long=True))


@promise(
    "It computes in the precision of its input: float32 is within 1e-4 of float64, on a bfloat16 model's numbers too, and dtypes stay",
    cases=_of_every_precision,
)
def precision(subject: Subject[Any], batch: TokenBatch) -> None:
    casts = LossyCasts()
    exact = LOSS.evaluate_or_undecidable(subject, batch, mode=casts)
    if casts.cause is not None:
        raise Broken(casts.cause, "Leave dtypes as they come, or cast to the dtype of tokens.logprobs")
    if batch.lengths.max(initial=0) >= rollouts.LONG:
        return  # sums over many tokens may leave float32: nothing to compare
    _require_precision(subject, batch, exact, "")
    drifted = batch.with_drift(_FAR)
    if drifted is not None:
        with suppress(Undecidable):
            _require_precision(
                subject,
                drifted,
                LOSS.evaluate_or_undecidable(subject, drifted),
                f" where other policies' log-probabilities are {_FAR:g} lower",
            )


def _require_precision(subject: Subject[Any], batch: TokenBatch, exact: Evaluation, where: str) -> None:
    single = LOSS.evaluate_or_undecidable(subject, batch, dtype=torch.float32)
    for got, due in ((exact.dtype, torch.float64), (single.dtype, torch.float32)):
        if got != due:
            raise Broken(f"returns {got} for {due} scores", "Leave the dtype as it comes; the engine hands out float32")
    if exact.drew:
        return  # other random numbers are drawn in other dtypes, so values cannot be compared
    if not is_same_evaluation(exact, single, relative=1e-4, absolute=1e-4 * max(1.0, exact.largest / _CANCELLING)):
        LOSS.require_repeatable(subject, batch)
        worst = int(np.argmax(np.abs(exact.per_token - single.per_token)))
        raise Broken(
            f"loses precision: token {worst} has {single.per_token[worst]:.6g} in float32 and {exact.per_token[worst]:.6g} in "
            f"float64{where}",
            "Cast nothing to half precision, subtract logarithms before exp(), and let no bound depend on the dtype",
        )


_FAR = 12.0
"""Nats: within the bounds that losses put on a log-ratio so that float32 holds its exponential, beyond all that a batch draws."""

_CANCELLING = 100.0
"""Larger numbers leave, where they cancel, errors that float32 cannot help: the tolerance grows with them."""


@frozen(eq=False)
class ScaledBatch:
    """A batch, and a factor for its advantages."""

    batch: TokenBatch
    factor: float

    def __str__(self) -> str:
        return f"{self.batch}\nadvantages times {self.factor:g}"


def _draw_scaled(subject: Subject[Any]) -> st.SearchStrategy[ScaledBatch]:
    return st.builds(ScaledBatch, draw_ordinary(subject), st.sampled_from((2.0, 0.5, 4.0, 1024.0)))


def _not_homogeneous(subject: Subject[Any]) -> str | None:
    if "advantages" not in needs_of(subject):
        return "the loss reads no advantages"
    return None if subject.declares("homogeneous") else "the loss does not declare homogeneous"


@promise(
    "Advantages times c > 0 give every token loss, and its gradient, times c, as it declares",
    exempt=_not_homogeneous,
    cases=_draw_scaled,
)
def homogeneous(subject: Subject[Any], case: ScaledBatch) -> None:
    advantages = case.batch.values["advantages"] * np.float32(case.factor)
    one, other = (
        LOSS.evaluate_or_undecidable(subject, case.batch),
        LOSS.evaluate_or_undecidable(subject, case.batch.with_values(advantages=advantages)),
    )
    numbers = {"loss": (one.per_token, other.per_token)}
    numbers |= {f"gradient by {name}": (gradient, other.gradients[name]) for name, gradient in one.gradients.items()}
    for what, (before, after) in numbers.items():
        if not is_same(case.factor * before, after):
            place = int(np.argmax(~np.isclose(case.factor * before, after)))
            raise Broken(
                f"declares homogeneous, and advantages times {case.factor:g} take the {what} of token {place} from {before[place]:.6g} "
                f"to {after[place]:.6g}",
                _DECLARE_OTHERWISE,
            )


_DECLARE_OTHERWISE = "Declare homogeneous = False"


@promise(
    "The tokens of a sequence whose advantages are all 0 have losses, and gradients, of exactly 0, as homogeneous declares",
    exempt=any_of(_not_homogeneous, batch_local),
    cases=draw_cuts,
    first=list_cuts,
)
def zero_advantages(subject: Subject[Any], case: CutBatch) -> None:
    worthless = case.batch.places(case.parts[0])
    advantages = case.batch.values["advantages"].copy()
    advantages[worthless] = 0
    evaluation = LOSS.evaluate_or_undecidable(subject, case.batch.with_values(advantages=advantages))
    numbers = {"loss": evaluation.per_token}
    numbers |= {f"gradient by {name}": gradient for name, gradient in evaluation.gradients.items()}
    for what, values in numbers.items():
        if values[worthless].any():
            place = int(worthless[np.flatnonzero(values[worthless])[0]])
            raise Broken(
                f"declares homogeneous, and the {what} of token {place} is {values[place]:.6g} where every advantage of its sequence is 0: "
                "steps leave out the gradient of such sequences",
                _DECLARE_OTHERWISE,
            )
