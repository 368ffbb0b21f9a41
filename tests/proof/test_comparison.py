"""Distance of passes where numbers are missing, not finite or of another shape: never as if they were equal."""

from typing import Any

import numpy as np
import pytest

from skyrl_engine.contracts.values.outputs import BatchOutput, Metric
from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.proof.comparison import Measurement, compare
from skyrl_engine.proof.diagnosis import Pieces, explain
from skyrl_engine.testing import Broken
from skyrl_engine.testing.backends.gradient_comparison import require_same_gradients


def gradients(**changed: Any) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    return {name: numbers.normal(size=(3, 2)).astype(np.float32) for name in ("first", "middle", "last")} | changed


def measure(loss: float = 2.0, last_token: float = 1.0, **changed: Any) -> Measurement:
    scored = Ragged.from_list([[0, 1], [0]], np.int32)
    fields = {"token_loss": Ragged(np.array([0.5, 0.5, last_token], np.float32), scored.offsets)}
    output = BatchOutput(np.array([4, 9]), np.array([2, 1]), scored, fields, {"loss": Metric.sum(loss)})
    return Measurement(loss, 2.0, gradients(**changed), output)


SPOILED = [np.full((3, 2), np.nan, np.float32), np.full((3, 2), np.inf, np.float32), np.zeros((2, 2), np.float32)]


def test_equal_passes_are_not_apart() -> None:
    assert compare(measure(), measure()).is_within(0.0)


@pytest.mark.parametrize("name", ["first", "middle", "last"])
@pytest.mark.parametrize("spoiled", SPOILED, ids=["nan", "inf", "shape"])
def test_a_gradient_that_cannot_be_compared_is_infinitely_far(name: str, spoiled: np.ndarray) -> None:
    comparison = compare(measure(**{name: spoiled}), measure())
    assert (comparison.gradient, comparison.parameter) == (np.inf, name)
    assert not comparison.is_within(1e300)


def test_a_parameter_without_gradient_has_the_gradient_0() -> None:
    short = measure()
    del short.gradients["middle"]  # type: ignore[attr-defined] # a dict in this test
    assert compare(short, measure()).gradient == 1.0
    assert compare(measure(), short).gradient == np.inf


def test_losses_and_tokens_that_are_no_numbers_are_infinitely_far() -> None:
    assert compare(measure(loss=np.nan), measure()).loss == np.inf
    assert compare(measure(last_token=np.nan), measure()).tokens == np.inf


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_the_cause_names_what_is_not_finite(number: float) -> None:
    pieces = Pieces(["all"], [gradients()], np.ones(1))
    cut: Any = None  # nothing is asked of it
    wrong = {name: gradient * np.float32(number) if name != "first" else gradient for name, gradient in gradients().items()}
    assert explain(wrong, pieces, pieces, cut, 1e-5) == "the gradient of middle is not finite, nor is another"


@pytest.mark.parametrize(
    ("spoiled", "words"),
    list(zip(SPOILED, ["is not finite", "is not finite", r"has the shape \(2, 2\), the parameter \(3, 2\)"], strict=True)),
    ids=["nan", "inf", "shape"],
)
def test_promises_name_it_too(spoiled: np.ndarray, words: str) -> None:
    with pytest.raises(Broken, match=f"the gradient of middle {words}"):
        require_same_gradients(gradients(middle=spoiled), gradients(), "of all", "Sum it", facts={}, pieces={"all": gradients()})
