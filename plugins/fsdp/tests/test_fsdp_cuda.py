"""The same promises on CUDA with NCCL: one rank per device, weights in float32, compute in float32 and bfloat16."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsdp_tasks import arrays

from skyrl_engine.contracts import AdamWSettings, ComputeDtype, MicroBatch, ModelConfig, RankEnvironment, RowKind
from skyrl_engine.modeling import document_kernel, tree_kernel
from skyrl_engine.modeling.tiny import make_parts_differ, write_model
from skyrl_engine.testing.backends.batches import (
    WeightedObjective,
    branching_documents,
    build_packed,
    build_padded,
    build_trees,
    definition,
    documents,
    find_worst_difference,
)
from skyrl_engine_fsdp.backend import FsdpBackend
from skyrl_engine_fsdp.plugin import FsdpConfig

pytestmark = pytest.mark.gpu

TOLERANCES: list[tuple[ComputeDtype, float]] = [("float32", 1e-4), ("bfloat16", 5e-2)]
"""float32 may use other matrix kernels than the CPU's, hence 1e-4; bfloat16 as on CPU."""


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    yield
    dist.destroy_process_group()


def start(
    directory: str, *, options: FsdpConfig | None = None, rows: RowKind = "padded", rate: float = 0.0, **model: Any
) -> FsdpBackend:
    backend = FsdpBackend(options or FsdpConfig())
    backend.setup(ModelConfig(directory, **model), AdamWSettings(learning_rate=rate), RankEnvironment(0, 1, "cuda:0", 0, rows))
    return backend


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
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
    """Offloaded weights stay in host memory."""
    backend = start(models[name], options=options, dtype=dtype, activation_checkpointing=True)
    backend.forward_backward(layout(documents(), 2), WeightedObjective())
    due = definition(models[name], documents())
    assert find_worst_difference(arrays(backend.gradients()), due.gradients) <= tolerance
    assert backend.optim_step().grad_norm > 0
    assert {parameter.device.type for parameter in backend._parameters().values()} == {"cpu" if options.cpu_offload else "cuda"}
    backend.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 whose heads of 64 numbers flash attention and FlexAttention take."""
    directory: Path = tmp_path_factory.mktemp("served")
    write_model(directory, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    make_parts_differ(directory)
    return str(directory)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of 18 million weights."""
    directory: Path = tmp_path_factory.mktemp("wide")
    write_model(directory, hidden_size=512, intermediate_size=1536, num_attention_heads=8, head_dim=64, num_hidden_layers=6)
    return str(directory)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("rows", ["packed", "tree"])
def test_kernels_for_whole_rows_give_the_defined_gradient(
    served: str, rows: RowKind, compiles: bool, dtype: ComputeDtype, tolerance: float
) -> None:
    """bfloat16 goes by the kernels; float32 run by run."""
    chosen, build = (branching_documents(), build_trees) if rows == "tree" else (documents(), build_packed)
    backend = start(served, rows=rows, dtype=dtype, compile=compiles)
    micro_batches = build(chosen, 1)
    scored = backend.forward(micro_batches, WeightedObjective())
    learned = backend.forward_backward(micro_batches, WeightedObjective())
    for name, values in learned.fields.items():
        assert np.array_equal(scored.fields[name].values, values.values), f"{name} of both passes has the same bits"
    assert find_worst_difference(arrays(backend.gradients()), definition(served, chosen).gradients) <= tolerance
    backend.close()
    if dtype == "bfloat16":
        # heads, key heads and their size, as the layers asked
        kernel = tree_kernel if rows == "tree" or document_kernel.find_missing() else document_kernel
        assert kernel._is_kernel_right(torch.device("cuda", 0), torch.bfloat16, 4, 2, 64, False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_backend_that_leaves_its_device_leaves_it_empty(wide: str, dtype: ComputeDtype) -> None:
    """And goes on, when it is back, as one that never left."""
    ends, empty = [], 0
    for leaves in (False, True):
        backend = start(wide, dtype=dtype, rate=1e-3)
        for _ in range(3):
            backend.forward_backward(build_padded(documents(), 4), WeightedObjective())
            if leaves:
                before = torch.cuda.memory_allocated()
                backend.offload()
                held = torch.cuda.memory_allocated()
                print(f"{before:,} bytes are allocated, {held:,} while away, and {empty:,} without a backend")
                assert held <= empty + 2**20
                assert torch.cuda.memory_reserved() <= empty + 2**22
                assert before > empty + 2**28
                backend.reload()
            backend.optim_step()
        ends.append(arrays(backend.weights()))
        backend.close()
        del backend
        empty = torch.cuda.memory_allocated()
    stayed, left = ends
    for name, weights in stayed.items():
        np.testing.assert_allclose(left[name], weights, rtol=0, atol=1e-5, err_msg=name)
