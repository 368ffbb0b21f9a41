"""Factors are found exactly, and named only where they are a number of the cut."""

import numpy as np
import pytest

from skyrl_engine.contracts.kinds.reducer import BatchStructure
from skyrl_engine.proof.diagnosis import Pieces, explain, in_words
from skyrl_engine.proof.plants import Cut

NUMBERS = np.random.default_rng(0)


def pieces(names: list[str], shares: list[float]) -> Pieces:
    return Pieces(names, [{"a": NUMBERS.normal(size=(3, 4)), "b": NUMBERS.normal(size=5)} for _ in names], np.array(shares))


def mix(of: Pieces, factors: list[float]) -> dict[str, np.ndarray]:
    return {name: sum(factor * piece[name] for factor, piece in zip(factors, of.gradients, strict=True)) for name in ("a", "b")}  # type: ignore[misc] # a sum of arrays


def cut(*ranks: int) -> Cut:
    """One token per sample; two samples to a micro-batch."""
    count = len(ranks)
    ids = np.arange(count)
    structure = BatchStructure(np.ones(count, dtype=np.uint8), np.arange(count + 1), ids, ids, ids // 2, sample_ids=ids)
    return Cut(structure, np.array(ranks))


PARTS = pieces(["ppo", "term kl"], [1.0, 1.0])
SAMPLES = pieces(["0", "1", "2", "3"], [1.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("factors", "ranks", "sentence"),
    [
        ([2.0] * 4, (0, 0, 0, 0), "gradient x2.00 = number of micro-batches"),
        ([0.5] * 4, (0, 0, 1, 1), "gradient x0.50 = 1 / number of ranks, each with one micro-batch"),
        ([0.5] * 6, (0, 0, 0, 0, 1, 1), "gradient x0.50 = 1 / number of ranks"),
        ([3.3] * 4, (0, 0, 0, 0), "gradient x3.30"),
        (
            [1.0, 1.0, 0.0, 0.0],
            (0, 0, 1, 1),
            "gradient x0.50 = rank 0's share of the loss weight: samples of rank 1 count for nothing",
        ),
        ([1.0, 2.0, 2.0, 3.0], (0, 0, 0, 0), "gradient x2.00 = number of micro-batches: samples count from x1.00 to x3.00"),
    ],
)
def test_by_sample(factors: list[float], ranks: tuple[int, ...], sentence: str) -> None:
    samples = pieces([str(number) for number in range(len(ranks))], [1.0] * len(ranks))
    assert explain(mix(samples, factors), PARTS, samples, cut(*ranks), 1e-6) == sentence


def test_by_part() -> None:
    wrong = mix(PARTS, [1.0, 2.0])
    assert explain(wrong, PARTS, SAMPLES, cut(0, 0, 0, 0), 1e-6) == "term kl counts x2.00 = number of micro-batches"


def test_what_no_factor_explains_is_said() -> None:
    wrong = mix(SAMPLES, [1.0] * 4)
    wrong["b"] = wrong["b"] + 10.0 * NUMBERS.normal(size=5)
    assert explain(wrong, PARTS, SAMPLES, cut(0, 0, 0, 0), 1e-6).endswith("% of it is no multiple of any sample's")


def test_a_sample_without_gradient_does_not_disturb() -> None:
    silent = Pieces(
        ["0", "1", "2", "3"], [*SAMPLES.gradients[:3], {"a": np.zeros((3, 4)), "b": np.zeros(5)}], np.array([1.0, 1.0, 1.0, 0.0])
    )
    wrong = {name: 2.0 * sum(piece[name] for piece in SAMPLES.gradients[:3]) for name in ("a", "b")}
    assert explain(wrong, PARTS, silent, cut(0, 0, 0, 0), 1e-6) == "gradient x2.00 = number of micro-batches"


def test_names_of_factors() -> None:
    known = {"number of micro-batches": 4.0, "number of ranks": 2.0}
    assert in_words(4.0, known) == "x4.00 = number of micro-batches"
    assert in_words(0.25001, known) == "x0.25 = 1 / number of micro-batches"
    assert in_words(4.1, known) == "x4.10"
    assert in_words(1.0, {"number of ranks": 1.0}) == "x1.00", "nothing is wrong with x1"
