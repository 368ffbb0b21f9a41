"""Context parallelism: the same sums, norms and steps as one plain process, where ranks divide the tokens of every sample.

Gradients are compared with the float64 definition (one process, one unpadded sequence at a time, whole logits), per parameter, as
||g - g'|| / ||g'||; float32 sums in another order stay below 1e-5. On CPU with gloo, two and four ranks.
"""

from pathlib import Path

import numpy as np
import pytest
from by_day import now
from fsdp_layouts import require_definition
from fsdp_tasks import accumulate_gradients, continue_training, outcome_with

from skyrl_engine.contracts import AdamWSettings
from skyrl_engine.testing.backends.batches import build_packed, build_padded, definition, documents, find_worst_difference
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.plugin import FsdpConfig

CP = FsdpConfig(context_parallel=2)
LAYOUTS = {
    "cp2": CP,
    "dp2 x cp2": CP,
    "cp4": FsdpConfig(context_parallel=4),
    "cp2 x tp2": FsdpConfig(context_parallel=2, tensor_parallel=2),
    "2 replicas of cp2": FsdpConfig(context_parallel=2, replicate=2),
}


@pytest.fixture(params=now(list(LAYOUTS), "cp2 x tp2"))
def layout(request: pytest.FixtureRequest) -> tuple[World, FsdpConfig]:
    """Ranks, and the options that lay them out."""
    return request.getfixturevalue("pair" if request.param == "cp2" else "quad"), LAYOUTS[request.param]


@pytest.mark.parametrize(
    ("name", "rows_are"),
    [
        ("qwen3-tied", "packed"),
        pytest.param("llama-untied", "padded", marks=pytest.mark.nightly),
        pytest.param("gemma3_text", "packed", marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", "packed", marks=pytest.mark.nightly),
        pytest.param("gemma2", "packed", marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_the_definitions(layout: tuple[World, FsdpConfig], models: dict[str, str], name: str, rows_are: str) -> None:
    """Over two calls of several micro-batches, an empty row among them; every rank sees one gradient, bit for bit."""
    world, options = layout
    due = definition(models[name], documents())
    build = build_padded if rows_are == "padded" else build_packed
    ranks = world.run(accumulate_gradients, models[name], build, options, rows=rows_are)
    sharing = options.tensor_parallel * options.context_parallel
    require_definition(ranks, due, sharing)


@pytest.mark.nightly
@pytest.mark.parametrize("recomputes", [False, True])
def test_float64_is_exact_to_1e_10(quad: World, models: dict[str, str], recomputes: bool) -> None:
    due = definition(models["qwen3-tied"], documents())
    options = LAYOUTS["cp4"]
    ranks = quad.run(
        accumulate_gradients, models["qwen3-tied"], build_packed, options, dtype="float64", activation_checkpointing=recomputes
    )
    assert find_worst_difference(ranks[0][1], due.gradients) <= 1e-10


@pytest.mark.nightly
def test_bfloat16_stays_within_its_precision(pair: World, models: dict[str, str]) -> None:
    due = definition(models["qwen3-tied"], documents())
    for _, gradients in pair.run(accumulate_gradients, models["qwen3-tied"], build_packed, CP, dtype="bfloat16"):
        assert find_worst_difference(gradients, due.gradients) <= 5e-2


@pytest.mark.nightly
def test_saved_and_resumed_equals_uninterrupted(quad: World, models: dict[str, str], tmp_path: Path) -> None:
    """Bit for bit, with dropout of attention, on tensor-parallel and context-parallel ranks."""
    options = LAYOUTS["cp2 x tp2"]
    ranks = quad.run(continue_training, models["dropout"], AdamWSettings(learning_rate=1e-2), tmp_path, options, before=1, after=2)
    for uninterrupted, resumed in ranks:
        assert uninterrupted[0] == resumed[0]
        for name, weight in uninterrupted[1].items():
            np.testing.assert_array_equal(weight, resumed[1][name], err_msg=name)
            np.testing.assert_array_equal(weight, ranks[0][0][1][name], err_msg=name)


@pytest.mark.nightly
def test_models_that_ranks_cannot_divide_are_refused(pair: World, models: dict[str, str]) -> None:
    for outcome in pair.run(outcome_with, models["mamba"], CP):
        assert "backend.context_parallel = 2 divides the tokens of every sample among ranks" in outcome
        assert "Set backend.context_parallel = 1, or choose another model" in outcome
