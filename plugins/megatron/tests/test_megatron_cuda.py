"""The same promise on one CUDA device, with NCCL. Layouts over several devices are not tested here."""

import pytest
import torch
import torch.distributed as dist
from megatron_tasks import ROWS, VOCABULARY, arrays

from skyrl_engine.contracts.backend import ComputeDtype, ModelSpec, OptimizerSpec, RankEnvironment
from skyrl_engine.testing.backend_batches import WeightedObjective, definition, documents, worst
from skyrl_engine_megatron.backend import MegatronBackend
from skyrl_engine_megatron.plugin import MegatronConfig


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT PROVED HERE: this needs a CUDA device, and there is none")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1e-1)])
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
def test_one_device_equals_the_definition(
    models: dict[str, str], name: str, rows: str, dtype: ComputeDtype, tolerance: float
) -> None:
    """float32 may use other matrix kernels than the CPU's, hence 1e-4; bfloat16 as on CPU."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        backend = MegatronBackend(MegatronConfig())
        spec = ModelSpec(models[name], dtype=dtype, activation_checkpointing=True)
        backend.setup(spec, OptimizerSpec(), RankEnvironment(0, 1, "cuda:0", 0))
        backend.forward_backward(ROWS[rows](documents(VOCABULARY), 2), WeightedObjective())
        assert worst(arrays(backend.gradients()), definition(models[name], documents(VOCABULARY)).gradients) <= tolerance
        assert backend.optim_step().grad_norm > 0
        backend.close()
    finally:
        dist.destroy_process_group()
