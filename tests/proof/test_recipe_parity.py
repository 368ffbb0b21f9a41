"""Every cell of recipes, backends and layouts is measured against float64 or refused by planning; recipe_cells.py says how."""

import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from parity import BACKENDS, LAYOUTS
from recipe_cells import RecipeCell, RecipeEntry, RecipeMatrix
from recipe_parity import PRODUCT, Place, read_kinds, write_page
from recipes import RECIPES

from skyrl_engine.errors import PluginNotFoundError

pytestmark = pytest.mark.timeout(900)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipe-parity.md"

BY_DAY: tuple[Place, ...] = (("staged", "fsdp", "dp1"), ("images", "fsdp", "pp2"), ("distill", "deepspeed z2", "tp2"))
"""A cell to measure on one rank, and refusals, which start none."""

BEFORE_A_RELEASE: tuple[Place, ...] = (
    ("rl + reference", "fsdp", "tp2"),
    ("generation", "fsdp", "dp2"),
    ("dpo", "deepspeed z2", "dp2"),
    ("ppo + critic", "megatron", "pp2"),
    ("distill rows", "megatron", "cp2"),
    ("staged", "megatron", "tp2"),
)

GOOD = RecipeCell(loss=1e-7, gradient=1e-6, weights=1e-7, logprobs=1e-6, tokens=0, moved=0.1)


@pytest.fixture(scope="module")
def matrix() -> Iterator[RecipeMatrix]:
    with RecipeMatrix() as made:
        yield made


@pytest.mark.parametrize(
    ("recipe", "backend", "layout"),
    [
        *BY_DAY,
        *(pytest.param(*place, marks=pytest.mark.proof) for place in BEFORE_A_RELEASE),
        *(pytest.param(*place, marks=pytest.mark.nightly) for place in PRODUCT if place not in (*BY_DAY, *BEFORE_A_RELEASE)),
    ],
)
def test_a_cell_is_measured_or_refused_as_the_page_says(matrix: RecipeMatrix, recipe: str, backend: str, layout: str) -> None:
    try:
        entry = matrix.entry(recipe, backend, layout)
    except PluginNotFoundError as error:
        pytest.skip(f"{backend} is not installed: {error.cause}")
    assert not entry.problem, entry.problem
    kind = "measured" if entry.cell is not None else "refused"
    assert kind == read_kinds(PAGE.read_text())[recipe, backend, layout], f"{entry.name} is {kind}: run nox -s parity"


def test_the_page_has_every_cell() -> None:
    assert read_kinds(PAGE.read_text()).keys() == set(PRODUCT)


def test_a_hole_is_seen_on_a_page_and_by_its_entry() -> None:
    entries = [RecipeEntry(*place, cell=GOOD) if "dp" in place[2] else RecipeEntry(*place, refused="No.") for place in PRODUCT]
    kinds = read_kinds(write_page(entries))
    assert kinds == {place: "measured" if "dp" in place[2] else "refused" for place in PRODUCT}
    hole = RecipeEntry("sft", "fsdp", "dp1")
    assert hole.problem == "a hole: neither measured nor refused"
    assert (set(PRODUCT) - read_kinds(write_page([hole, *entries[1:]])).keys()) == {("sft", "fsdp", "dp1")}
    assert len(PRODUCT) == len(RECIPES) * len(BACKENDS) * len(LAYOUTS)


@pytest.mark.parametrize(
    "worse", [{"loss": 2e-6}, {"gradient": 2e-5}, {"weights": 2e-6}, {"logprobs": 1e-4}, {"tokens": 1}, {"moved": 1e-5}], ids=str
)
def test_each_number_of_a_cell_is_held(worse: dict[str, float]) -> None:
    assert GOOD.agrees
    assert not attrs.evolve(GOOD, **worse).agrees
