"""Weights in bfloat16 without float32 master weights, on ranks that divide them: resumed bit for bit, equal where they are copies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_tasks import continue_training, own_rows, start

from skyrl_engine.contracts import AdamWSettings
from skyrl_engine.testing.backends.batches import WeightedObjective, build_padded, documents
from skyrl_engine.testing.ranks.world import World
from skyrl_engine_fsdp.plugin import FsdpConfig

SETTINGS = AdamWSettings(learning_rate=1e-3, weight_decay=0.1, stochastic_rounding=True)


def gather_after_steps(directory: str, options: FsdpConfig) -> tuple[set[str], set[str], dict[str, bytes]]:
    """Return the precisions of this rank's weights and of its gradients, and its own shards after two steps over several micro-batches."""
    backend = start(directory, SETTINGS, options=options, dtype="bfloat16")
    gradients: set[str] = set()
    for _ in range(2):
        backend.forward_backward(build_padded(own_rows(documents(), backend), 2), WeightedObjective())
        gradients |= {str(parameter.grad.dtype) for parameter in backend._parameters().values() if parameter.grad is not None}
        backend.optim_step()
    shards = {name: parameter.to_local().detach() for name, parameter in backend._parameters().items()}
    weights = {str(shard.dtype) for shard in shards.values()}
    return weights, gradients, {name: shard.float().numpy().tobytes() for name, shard in shards.items()}


@pytest.mark.parametrize(
    "options",
    [FsdpConfig(), pytest.param(FsdpConfig(tensor_parallel=2), marks=pytest.mark.nightly)],
    ids=["dp2", "tp2"],
)
def test_two_ranks_continue_bit_for_bit(pair: World, models: dict[str, str], tmp_path: Path, options: FsdpConfig) -> None:
    for uninterrupted, resumed in pair.run(
        continue_training, models["llama-untied"], SETTINGS, tmp_path, options, before=2, after=2, dtype="bfloat16"
    ):
        assert uninterrupted[0] == resumed[0]
        for name, weight in uninterrupted[1].items():
            np.testing.assert_array_equal(weight, resumed[1][name], err_msg=name)
            assert torch.equal(torch.from_numpy(weight).bfloat16().float(), torch.from_numpy(weight)), f"{name} is not bfloat16"


@pytest.mark.parametrize("options", [FsdpConfig(replicate=2), FsdpConfig(gradient_sync="pass")], ids=["replicate", "pass"])
def test_weights_are_bfloat16_and_gradients_float32(pair: World, models: dict[str, str], options: FsdpConfig) -> None:
    """Copies of a shard are rounded alike, or they would drift apart."""
    results: list[Any] = pair.run(gather_after_steps, models["qwen3-tied"], options)
    for weights, gradients, _ in results:
        assert weights == {"torch.bfloat16"}
        assert gradients == {"torch.float32"}
    first, second = (shards for _, _, shards in results)
    assert (first == second) is (options.replicate == 2)
