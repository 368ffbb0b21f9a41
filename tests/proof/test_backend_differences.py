"""Verdict on two backends' numbers: a common factor and its name, or the layer where the difference enters."""

from collections.abc import Callable

import attrs
import numpy as np
import pytest

from skyrl_engine.contracts.values.outputs import BatchOutput, Metric
from skyrl_engine.contracts.values.ragged import Ragged
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.proof.backends import BackendDifference, Side, difference, facts_of, layer_of
from skyrl_engine.proof.comparison import Measurement

NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.weight",
    "lm_head.weight",
]
FACTS = facts_of(Topology(), Topology(dp=2, tp=2), micro_batches={"a": 6, "b": 3}, tokens=100)


def side(change: Callable[[str, np.ndarray], np.ndarray] = lambda _, gradient: gradient, *, shift: float = 0.0) -> Side:
    """Random gradients, changed; log-probabilities of two samples, shifted at the last token."""
    numbers = np.random.default_rng(0)
    gradients = {name: change(name, numbers.normal(size=(3, 4)).astype(np.float32)) for name in NAMES}
    scored = Ragged.from_list([[0, 1], [2]], np.int32)
    logprobs = np.array([-1.0, -2.0, -3.0 + shift], dtype=np.float32)
    output = BatchOutput(
        np.array([4, 9]),
        np.array([2, 3]),
        scored,
        {"logprobs": Ragged(logprobs, scored.offsets)},
        {"loss": Metric.sum(2.0 + shift)},
    )
    return Side("x", Measurement(2.0 + shift, 2.0, gradients, output))


def compare_with_side(a: Side) -> BackendDifference:
    return difference(a, side(), facts=FACTS)


def test_equal_numbers_agree() -> None:
    found = compare_with_side(side())
    assert found.agrees
    assert found.explanation == "the backends agree"
    assert found.first_layer is None


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (4.0, "x4.00 = world size of b"),
        (0.5, "x0.50 = 1 / data-parallel size of b"),
        (1 / 6, "x0.17 = 1 / micro-batches of a rank of a"),
        (0.01, "x0.01 = 1 / loss-carrying tokens"),
        (1.7, "x1.70"),
    ],
)
def test_a_common_factor_is_named(factor: float, words: str) -> None:
    found = compare_with_side(side(lambda _, gradient: gradient * np.float32(factor)))
    assert not found.agrees
    assert found.explanation == f"gradients of every parameter differ by one factor: {words}"


def test_a_factor_on_some_parameters_says_on_how_many() -> None:
    """As where replicated norms see local heads only, and nobody sums over tensor ranks."""
    found = compare_with_side(side(lambda name, gradient: gradient * np.float32(0.25) if "q_proj" in name else gradient))
    assert found.explanation == (
        "gradients of 1 of 5 parameters, all in model.layers.1, differ by one factor: x0.25 = 1 / world size of b"
    )
    assert found.worst[0].name == "model.layers.1.self_attn.q_proj.weight"
    assert found.first_layer == "model.layers.1"


def test_the_first_layer_counts_from_the_head() -> None:
    def break_gradient(name: str, gradient: np.ndarray) -> np.ndarray:
        return gradient[::-1].copy() if name.startswith(("model.embed", "model.layers.0")) else gradient

    found = compare_with_side(side(break_gradient))
    assert found.explanation == (
        "outputs agree, gradients of 2 of 5 parameters do not agree; counted from the head, model.layers.0 is the first to diverge"
    )


def test_a_difference_of_the_forward_pass_is_told_apart() -> None:
    found = compare_with_side(side(lambda _, gradient: gradient[::-1].copy(), shift=0.5))
    assert found.explanation == "the passes differ in logprobs"
    (worst,) = found.fields
    assert (worst.largest, worst.sample, worst.token) == (0.5, 9, 2)
    assert found.loss == pytest.approx(0.25)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [NAMES[0], NAMES[2], NAMES[-1]])
def test_a_gradient_that_is_not_finite_is_no_agreement(number: float, name: str) -> None:
    """Wherever it is, and on either side: NaN compares with nothing, and infinity less infinity is NaN."""
    spoiled = side(lambda key, gradient: np.where(np.eye(3, 4), np.float32(number), gradient) if key == name else gradient)
    for found, which in ((difference(spoiled, side(), facts=FACTS), "first"), (difference(side(), spoiled, facts=FACTS), "second")):
        assert not found.agrees
        assert found.explanation == f"the gradient of {name} is not finite on the {which}"
        assert found.worst[0].name == name
        assert found.first_layer == layer_of(name)
    assert not difference(spoiled, spoiled, facts=FACTS).agrees


def test_gradients_of_other_shapes_are_named() -> None:
    """A wrong shard, and a transposed matrix."""
    for change, shape in ((lambda gradient: gradient[:2], "[2, 4]"), (lambda gradient: gradient.T, "[4, 3]")):
        found = compare_with_side(side(lambda name, gradient, change=change: change(gradient) if name == NAMES[1] else gradient))
        assert found.explanation == f"the gradient of {NAMES[1]} is of the shape {shape} on the first and [3, 4] on the second"
        assert not found.agrees


@pytest.mark.parametrize("shift", [2e-4, -0.1, np.nan, np.inf])
def test_outputs_that_differ_are_no_agreement(shift: float) -> None:
    """Also where losses and gradients do agree."""
    other = side()
    other.measured.output.fields["logprobs"].values[1] += shift
    found = compare_with_side(other)
    assert not found.agrees
    assert found.forward_differs
    assert found.explanation == "the passes differ in logprobs"
    assert (found.fields[0].sample, found.fields[0].token) == (4, 1)
    assert found.fields[0].largest == pytest.approx(abs(shift) if np.isfinite(shift) else np.inf, rel=1e-2)


def test_an_output_of_the_loss_alone_is_named() -> None:
    sides = [side(), side()]
    for side_of_two, number in zip(sides, (1.0, 1.5), strict=True):
        output = side_of_two.measured.output
        tokens = Ragged(np.full(3, number, np.float32), output.scored.offsets)
        output.fields["token_loss"] = tokens  # type: ignore[index] # a dict in this test
    found = difference(*sides, facts=FACTS)
    assert not found.agrees
    assert found.explanation == "gradients agree, but the passes differ in token_loss"


def test_outputs_are_not_said_to_agree_where_the_loss_differs() -> None:
    """A loss that is computed wrongly has wrong gradients, too; the model's scores are right."""
    other = side(lambda _, gradient: gradient[::-1].copy())
    found = compare_with_side(Side("x", attrs.evolve(other.measured, loss=3.0)))
    assert found.explanation == (
        "the passes differ in the loss, gradients of every parameter do not agree; counted from the head, lm_head is the first to diverge"
    )


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_no_agreement(number: float) -> None:
    spoiled = Side("x", attrs.evolve(side().measured, loss=number))
    assert compare_with_side(spoiled).loss == np.inf
    assert compare_with_side(spoiled).explanation == "gradients agree, but the passes differ in the loss"


def test_a_missing_parameter_is_no_agreement() -> None:
    short = side()
    short.measured.gradients.pop("lm_head.weight")  # type: ignore[attr-defined] # a dict in this test
    found = compare_with_side(short)
    assert not found.agrees
    assert found.only_b == ("lm_head.weight",)
    assert found.explanation == "the first backend has no gradient of lm_head.weight"


def test_layers() -> None:
    assert layer_of("model.layers.12.mlp.experts.3.up_proj.weight") == "model.layers.12"
    assert layer_of("lm_head.weight") == "lm_head"
    assert layer_of("model.norm.weight") == "model.norm"
