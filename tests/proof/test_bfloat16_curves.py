"""Trainings in bfloat16 over float32 master weights stay near those of float64; without masters they do not. See bfloat16_curves.py."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bfloat16_curves import MARK, PLAIN, RUNS, STOCHASTIC, WITHOUT_MASTERS, list_outside, measure, measure_all, train, train_plainly
from parity import BACKENDS, Matrix

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "precision.md"

FEW = 10
"""Steps of the test by day, in which weights are as far from float64 as after many; losses are not yet."""


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with Matrix(keys=()) as made:
        yield made


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_ten_steps_keep_float32_weights(matrix: Matrix) -> None:
    """The mistake that it must show is made beside it: weights in bfloat16 alone, which small updates do not move."""
    directory = Path(matrix.model().path)
    start = train_plainly(directory, "float64", 0).weights
    expected = train_plainly(directory, "float64", FEW)
    assert measure(train(matrix, "fsdp", "dp1", steps=FEW), expected, start).is_within_bounds()
    assert not measure(train_plainly(directory, "none", FEW), expected, start).is_within_bounds()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_two_hundred_steps_stay_near_float64(matrix: Matrix) -> None:
    distances = measure_all(matrix)
    assert distances.keys() == {PLAIN, WITHOUT_MASTERS, STOCHASTIC, *RUNS}
    assert list_outside(distances) == []


def test_every_backend_is_measured_and_on_the_page() -> None:
    """The page has a run of each backend and no row of a run that is gone; nights run all."""
    libraries = {str(options["use"]) for options in BACKENDS.values()}
    assert {str(BACKENDS[backend]["use"]) for backend, _ in RUNS.values()} == libraries
    _, rows, _ = PAGE.read_text(encoding="utf-8").split(MARK)
    shown = {line.split("|")[1].strip() for line in rows.strip().splitlines()[2:]}
    others = {PLAIN, WITHOUT_MASTERS, STOCHASTIC}
    assert others <= shown <= {*others, *RUNS}
    assert {str(BACKENDS[RUNS[name][0]]["use"]) for name in shown & RUNS.keys()} == libraries
