"""A checkpoint goes on under another layout of ranks: weights and moments bit for bit, steps as if nothing had changed but rounding.

AdamW's epsilon is large, so that rounding in a gradient moves a weight as little as it moves the gradient; with the usual one, the sign of a
gradient near zero would decide.
"""

import logging
from pathlib import Path

import numpy as np
import pytest
from fsdp_tasks import losses_after, resume_checkpoint, save_checkpoint, save_only

from skyrl_engine.contracts import AdafactorSettings, AdamW8BitSettings, AdamWSettings, MuonSettings, OptimizerSettings
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.plugin import FsdpConfig

OPTIMIZER = AdamWSettings(learning_rate=1e-2, epsilon=0.5, weight_decay=0.1)
DP = FsdpConfig()
TP = FsdpConfig(tensor_parallel=2)
HYBRID = FsdpConfig(replicate=2)
CP = FsdpConfig(context_parallel=2)


def _sharing(options: FsdpConfig) -> int:
    """Ranks that compute the same samples."""
    return options.tensor_parallel * options.context_parallel


@pytest.fixture
def run(request: pytest.FixtureRequest):
    """`run(ranks, function, ...)`: results by rank, on so many ranks."""

    def on(ranks: int, function, *arguments):
        if ranks == 1:
            request.getfixturevalue("alone")
            return [function(*arguments)]
        return request.getfixturevalue({2: "pair", 4: "quad"}[ranks]).run(function, *arguments)

    return on


@pytest.mark.parametrize(
    ("ranks", "options", "later_ranks", "later"),
    [
        pytest.param(1, DP, 2, DP, id="1 to dp2", marks=pytest.mark.nightly),
        pytest.param(2, DP, 1, DP, id="dp2 to 1"),
        pytest.param(2, DP, 2, TP, id="dp2 to tp2"),
        pytest.param(2, TP, 1, DP, id="tp2 to 1", marks=pytest.mark.nightly),
        pytest.param(2, TP, 4, TP, id="tp2 to dp2 x tp2", marks=pytest.mark.nightly),
        pytest.param(2, CP, 1, DP, id="cp2 to 1"),
        pytest.param(1, DP, 2, CP, id="1 to cp2", marks=pytest.mark.nightly),
        pytest.param(4, CP, 4, TP, id="dp2 x cp2 to dp2 x tp2", marks=pytest.mark.nightly),
        pytest.param(4, TP, 4, HYBRID, id="dp2 x tp2 to 2 replicas of 2", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", ["llama-untied", pytest.param("qwen3-tied", marks=pytest.mark.nightly)])
def test_another_layout_goes_on(
    run, models: dict[str, str], tmp_path: Path, name: str, ranks: int, options: FsdpConfig, later_ranks: int, later: FsdpConfig
) -> None:
    before = run(ranks, save_checkpoint, models[name], OPTIMIZER, tmp_path, options)
    after = run(later_ranks, resume_checkpoint, models[name], OPTIMIZER, tmp_path, later)
    (_, weights, moments), (_, loaded, loaded_moments) = before[0], after[0]
    assert weights.keys() == loaded.keys()
    assert moments.keys() == loaded_moments.keys()
    for key, value in {**weights, **moments}.items():
        np.testing.assert_array_equal({**loaded, **loaded_moments}[key], value, err_msg=key)
    for step in range(2):
        losses = [sum(own[step][0] for own, _, _ in side) for side in (before, after)]
        assert losses[0] / _sharing(options) == pytest.approx(losses[1] / _sharing(later), rel=1e-5)
        assert before[0][0][step][1] == pytest.approx(after[0][0][step][1], rel=1e-4)
        assert before[0][0][step][2] == after[0][0][step][2], "the schedule goes on"


@pytest.mark.parametrize(
    "optimizer",
    [
        AdafactorSettings(learning_rate=0.05),
        AdamW8BitSettings(learning_rate=1e-2),
        pytest.param(MuonSettings(learning_rate=1e-2), marks=pytest.mark.nightly),
    ],
    ids=lambda settings: settings.use,
)
def test_state_of_other_shapes_goes_on(run, models: dict[str, str], tmp_path: Path, optimizer: OptimizerSettings) -> None:
    """State that is whole on every rank, and scales of blocks of a row, which are divided as the weight is."""
    model = models["wide" if optimizer.use == "adamw_8bit" else "llama-untied"]
    (_, weights, moments), _ = run(2, save_checkpoint, model, optimizer, tmp_path, DP)
    ((_, loaded, loaded_moments),) = run(1, resume_checkpoint, model, optimizer, tmp_path, DP)
    assert {**weights, **moments}.keys() == {**loaded, **loaded_moments}.keys()
    for key, value in {**weights, **moments}.items():
        np.testing.assert_array_equal({**loaded, **loaded_moments}[key], value, err_msg=key)


@pytest.mark.usefixtures("alone")
def test_random_states_of_another_layout_start_anew_and_say_so(
    pair: World, models: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From seed, step and rank alone: the same whenever it is loaded."""
    pair.run(save_only, models["dropout"], tmp_path)
    with caplog.at_level(logging.WARNING):
        losses = losses_after(models["dropout"], tmp_path, DP, 2)
    assert losses[0] == losses[1]
    assert "is of 2 data-parallel x 1 tensor-parallel x 1 context-parallel ranks, this run has 1 x 1 x 1" in caplog.text
    assert "random states (dropout) start anew" in caplog.text
    first, second = pair.run(losses_after, models["dropout"], tmp_path, TP, 1)
    assert first == second
