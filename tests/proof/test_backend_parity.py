"""Every backend on every layout computes what one float32 process computes, or refuses while planning; see parity.py for what is measured."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import loss_curves
from parity import (
    BACKENDS,
    COLLATORS,
    DIVERGENCES,
    EVERY,
    GRADIENT,
    LAYOUTS,
    LOSSES,
    TAUGHT,
    WEIGHTS,
    Entry,
    Key,
    Matrix,
    fitting,
    table,
)

from skyrl_engine.errors import PluginNotFoundError

pytestmark = pytest.mark.timeout(900)

RUNS = {
    "fsdp": ("dp1", "dp2", "tp2", "cp2", "tp2xdp2", "tp2xcp2"),
    **{f"deepspeed z{stage}": ("dp1", "dp2") for stage in range(4)},
    "megatron": LAYOUTS,
}
"""Layouts that must run; others must be refused. A layout that becomes possible moves in here."""


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with Matrix() as made:
        yield made


@pytest.fixture(scope="module")
def entries(pytestconfig: pytest.Config) -> Iterator[list[Entry]]:
    """Measured entries, printed as a table in the end."""
    measured: list[Entry] = []
    yield measured
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line("\n" + table(measured) + "\n\n" + table(measured, TAUGHT))


OF_BACKENDS = pytest.mark.parametrize(("backend", "layout"), [(backend, layout) for backend in BACKENDS for layout in LAYOUTS])

BY_DAY = {
    "fsdp": ("dp2", "tp2xdp2"),
    **{f"deepspeed z{stage}": ("dp2",) for stage in (2, 3)},
    "megatron": ("dp2", "tp2", "pp2", "cp2", "tp2xpp2"),
}
"""Layouts to run with every change: every way to divide once. Refusals are quick, and asked each time."""


def by_day(backend: str, layout: str) -> bool:
    return layout in BY_DAY.get(backend, ()) or layout not in RUNS[backend]


OF_BACKENDS_BY_DAY = pytest.mark.parametrize(
    ("backend", "layout"),
    [
        pytest.param(backend, layout, marks=() if by_day(backend, layout) else pytest.mark.nightly)
        for backend in BACKENDS
        for layout in LAYOUTS
    ],
)


def some(backend: str, layout: str) -> list[Key]:
    """A loss and a divergence from a teacher over each form of rows; layouts take turns, so that every library has all of them."""
    turn = list(BACKENDS).index(backend) + LAYOUTS.index(layout)
    return fitting(backend, layout, [key for losses in (list(LOSSES), list(DIVERGENCES)) for key in taking_turns(losses, turn)])


def taking_turns(losses: Sequence[str], turn: int) -> list[Key]:
    return [(losses[(turn + place) % len(losses)], collator) for place, collator in enumerate(COLLATORS)]


@pytest.mark.proof
@OF_BACKENDS_BY_DAY
def test_a_backend_on_a_layout(matrix: Matrix, entries: list[Entry], backend: str, layout: str) -> None:
    check(matrix, entries, backend, layout, some(backend, layout))


CLIPPED = [
    pytest.param("fsdp", "dp1", marks=pytest.mark.nightly),
    ("fsdp", "dp2"),
    *(pytest.param(f"deepspeed z{stage}", "dp2", marks=() if stage == 3 else pytest.mark.nightly) for stage in range(4)),
    ("megatron", "tp2"),
    pytest.param("megatron", "dp2", marks=pytest.mark.nightly),
]


@pytest.mark.proof
@pytest.mark.parametrize(("backend", "layout"), CLIPPED)
def test_the_clipped_step_is_the_same_on_all_layouts(matrix: Matrix, backend: str, layout: str) -> None:
    """The norm is that of the gradients in float64; the step follows the gradient of one process, scaled to a seventh of its norm.

    A float32 sum would be off by 1e-8 and more, so the norm is held to 1e-9, and rank against rank to the last bit by the conformance suites.
    The norm of another layout's gradients, and the step, differ by what float32 leaves to gradients and weights.
    """
    try:
        reported, own, moved = matrix.clipped_step(backend, layout)
    except PluginNotFoundError as error:
        pytest.skip(f"{backend} is not installed: {error.cause}")
    assert reported == pytest.approx(own, rel=1e-9)
    norm, expected = matrix.clipped_definition()
    assert reported == pytest.approx(norm, rel=GRADIENT)
    assert moved.keys() == expected.keys()
    for name, movement in expected.items():
        assert np.linalg.norm(moved[name] - movement) <= WEIGHTS * np.linalg.norm(movement), name


@pytest.mark.nightly
@OF_BACKENDS
def test_every_loss_and_collator_on_a_layout(matrix: Matrix, entries: list[Entry], backend: str, layout: str) -> None:
    if layout in RUNS[backend]:
        check(matrix, entries, backend, layout, fitting(backend, layout, (*EVERY, *TAUGHT)))


def check(matrix: Matrix, entries: list[Entry], backend: str, layout: str, keys: Sequence[Key]) -> None:
    try:
        entry = matrix.entry(backend, layout, keys)
    except PluginNotFoundError as error:
        pytest.skip(f"{backend} is not installed: {error.cause}")
    entries.append(entry)
    if layout not in RUNS[backend]:
        assert entry.refused, f"{entry.name} runs; say so in RUNS"
        assert "does not declare the capability" in entry.refused, entry.refused
        return
    assert not entry.refused, entry.refused
    assert not entry.failed, entry.failed
    assert set(entry.cells) == set(keys)
    wrong = {key: cell for key, cell in entry.cells.items() if not cell.agrees}
    assert not wrong, f"{entry.name}: {wrong}"


def test_turns_reach_every_loss_and_collator() -> None:
    assert {key for layout in RUNS["megatron"] for key in some("megatron", layout)} == {*EVERY, *TAUGHT}
    assert {
        key for backend in BACKENDS for layout in RUNS[backend] if backend.startswith("deepspeed") for key in some(backend, layout)
    } == {*EVERY, *TAUGHT}


@pytest.mark.nightly
def test_thirty_steps_are_the_same_on_all_backends(matrix: Matrix) -> None:
    for name, (backend, layout) in loss_curves.RUNS.items():
        assert layout in RUNS[backend], name
    curves = loss_curves.measure(matrix)
    assert {len(curve) for curve in curves.values()} == {loss_curves.STEPS}
    first = next(iter(curves.values()))
    assert first[-1] < 0.9 * first[0], "nothing was learned"
    assert loss_curves.disagreements(curves) == []
    halved = {**curves, "half of the last": next(reversed(curves.values())) / 2}
    assert loss_curves.disagreements(halved) == ["half of the last"]
