"""The same promise on CUDA with NCCL: one rank per device, weights in float32, compute in float32 and bfloat16."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fsdp_tasks import arrays

from skyrl_engine.contracts import AdamWSettings, ComputeDtype, MicroBatch, ModelConfig, RankEnvironment
from skyrl_engine.testing.backends.batches import (
    WeightedObjective,
    build_packed,
    build_padded,
    definition,
    documents,
    find_worst_difference,
)
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.plugin import FsdpConfig


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT PROVED HERE: this needs a CUDA device, and there is none")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("layout", [build_padded, build_packed], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["qwen3-tied", "gemma3_text"])
@pytest.mark.parametrize("options", [FsdpConfig(), FsdpConfig(cpu_offload=True)], ids=["on-device", "offloaded"])
def test_one_device_equals_a_plain_process(
    models: dict[str, str],
    name: str,
    layout: Callable[..., list[MicroBatch]],
    dtype: ComputeDtype,
    tolerance: float,
    options: FsdpConfig,
) -> None:
    """float32 may use other matrix kernels than the CPU's, hence 1e-4; bfloat16 as on CPU. Offloaded weights stay in host memory."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        backend = FsdpBackend(options)
        spec = ModelConfig(models[name], dtype=dtype, activation_checkpointing=True)
        backend.setup(spec, AdamWSettings(), RankEnvironment(0, 1, "cuda:0", 0))
        backend.forward_backward(layout(documents(), 2), WeightedObjective())
        due = definition(models[name], documents())
        assert find_worst_difference(arrays(backend.gradients()), due.gradients) <= tolerance
        assert backend.optim_step().grad_norm > 0
        assert {parameter.device.type for parameter in backend._parameters().values()} == {"cpu" if options.cpu_offload else "cuda"}
        backend.close()
    finally:
        dist.destroy_process_group()
