"""The same promises on CUDA with NCCL: one rank, float32 and bfloat16, with and without offload to host memory."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed_tasks import OPTIMIZER, STILL, arrays, batch, train

from skyrl_engine.contracts import AdamWSettings, ModelConfig, RankEnvironment
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.backends.batches import WeightedObjective, definition, documents, find_worst_difference
from skyrl_engine_deepspeed.backend import DeepSpeedBackend
from skyrl_engine_deepspeed.plugin import DeepSpeedConfig

pytestmark = pytest.mark.gpu

OFFLOADS = [{}, {"offload_optimizer": True}, {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}]


@pytest.fixture(scope="module", autouse=True)
def _world() -> Any:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    yield
    dist.destroy_process_group()


def started(directory: str, config: DeepSpeedConfig, optimizer: AdamWSettings = STILL, **model: Any) -> DeepSpeedBackend:
    backend = DeepSpeedBackend(config)
    backend.setup(ModelConfig(directory, **model), optimizer, RankEnvironment(0, 1, "cuda:0", 0))
    return backend


@pytest.mark.parametrize("offload", OFFLOADS, ids=["device", "optimizer-offload", "full-offload"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_and_norm(
    models: dict[str, str], stage: int, rows: str, dtype: str, tolerance: float, offload: dict[str, Any]
) -> None:
    """float32 may use other matrix kernels than the CPU's, hence 1e-4; bfloat16 as on CPU. Two calls accumulate."""
    config = DeepSpeedConfig(**{"zero_stage": stage, **offload})
    backend = started(models["qwen3"], config, dtype=dtype, activation_checkpointing=True)
    due = definition(models["qwen3"], documents(VOCABULARY), dtype=torch.float32).gradients
    for _ in range(2):
        backend.forward_backward(batch(rows), WeightedObjective())
    assert find_worst_difference(arrays(backend.gradients()), {name: 2 * gradient for name, gradient in due.items()}) <= tolerance
    norm = np.sqrt(sum(np.square(gradient.astype(np.float64)).sum() for gradient in due.values()))
    assert backend.optim_step().grad_norm == pytest.approx(2 * norm, rel=tolerance)
    backend.close()


@pytest.mark.parametrize("offload", OFFLOADS, ids=["device", "optimizer-offload", "full-offload"])
def test_offload_changes_no_step(models: dict[str, str], offload: dict[str, Any]) -> None:
    """AdamW on the host rounds as AdamW on the device does, to a few units in the last place."""
    plain, offloaded = (started(models["llama"], DeepSpeedConfig(**options), OPTIMIZER) for options in ({}, offload))
    for (_, norm, rate), (_, other_norm, other_rate) in zip(train(plain, 3), train(offloaded, 3), strict=True):
        assert other_norm == pytest.approx(norm, rel=1e-4)
        assert other_rate == rate
    weights = arrays(offloaded.weights())
    for name, weight in plain.weights():
        np.testing.assert_allclose(weights[name], weight.numpy(), rtol=0, atol=1e-4, err_msg=name)
    plain.close()
    offloaded.close()
