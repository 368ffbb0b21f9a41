"""The same promise on one CUDA device, with NCCL; attention by torch, and by Transformer Engine where that is installed.

Layouts over several devices are not tested here; a run compares Transformer Engine's attention with torch's on its own ranks before it trains.
"""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from megatron_tasks import ROWS, VOCABULARY, arrays

from skyrl_engine.contracts import AdamWSettings, ComputeDtype, ModelConfig, RankEnvironment
from skyrl_engine.testing.backends.batches import Arrays, WeightedObjective, definition, documents, find_worst_difference
from skyrl_engine_megatron.backend import MegatronBackend
from skyrl_engine_megatron.plugin import MegatronConfig


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1e-1)])
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
def test_one_device_equals_the_definition(
    models: dict[str, str], name: str, rows: str, dtype: ComputeDtype, tolerance: float
) -> None:
    """float32 may use other matrix kernels than the CPU's, hence 1e-4; bfloat16 as on CPU."""
    gradients, _ = run_passes_on_device(models[name], rows, dtype, MegatronConfig(attention="torch"))
    assert find_worst_difference(gradients, definition(models[name], documents(VOCABULARY)).gradients) <= tolerance


@pytest.mark.gpu
@pytest.mark.skipif(
    find_spec("transformer_engine") is None, reason="NOT PROVED HERE: this needs Transformer Engine, which is not installed"
)
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied"])
def test_transformer_engine_equals_the_definition(models: dict[str, str], name: str, rows: str) -> None:
    gradients, attention = run_passes_on_device(models[name], rows, "bfloat16", MegatronConfig(attention="transformer_engine"))
    assert attention == "DocumentKernels"
    assert find_worst_difference(gradients, definition(models[name], documents(VOCABULARY)).gradients) <= 1e-1


def run_passes_on_device(directory: str, rows: str, dtype: ComputeDtype, options: MegatronConfig) -> tuple[Arrays, str]:
    """Gradients on the device, and the class that attended."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        backend = MegatronBackend(options)
        spec = ModelConfig(directory, dtype=dtype, activation_checkpointing=True)
        backend.setup(spec, AdamWSettings(), RankEnvironment(0, 1, "cuda:0", 0))
        backend.forward_backward(ROWS[rows](documents(VOCABULARY), 2), WeightedObjective())
        gradients = arrays(backend.gradients())
        assert backend.optim_step().grad_norm > 0
        attention = type(backend._pipeline.pieces[0].decoder.layers[0].self_attention.core_attention).__name__
        backend.close()
    finally:
        dist.destroy_process_group()
    return gradients, attention
