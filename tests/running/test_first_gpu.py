"""The report of the first GPU reads traces rightly, and says without a device what it would run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from first_gpu import BACKENDS, list_marked_files, list_parts, main, run_part
from step_profile import STEPS, profile_steps
from step_trace import read_events

from skyrl_engine.registry.resolve import Registry

MAIN, AUTOGRAD = 1, 2


def event(category: str, name: str, begin: float, duration: float, thread: int = MAIN) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "tid": thread}


EVENTS = [
    event("cpu_op", "aten::to", 0, 50),
    event("cpu_op", "aten::copy_", 5, 40),
    event("cuda_runtime", "cudaMemcpyAsync", 10, 2),
    event("cuda_runtime", "cudaStreamSynchronize", 12, 20),
    event("cuda_runtime", "cudaLaunchKernel", 60, 3),
    event("cuda_runtime", "cudaLaunchKernelExC", 64, 3),
    event("cuda_driver", "cuLaunchKernelEx", 68, 3, AUTOGRAD),
    event("cuda_runtime", "cudaDeviceSynchronize", 500, 10, AUTOGRAD),
    event("cpu_op", "aten::_local_scalar_dense", 490, 30),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 12, 5),
    # computing from 100 to 200 and from 300 to 400, one kernel inside of another stream's; sending from 150 to 250
    event("kernel", "gemm", 100, 100),
    event("kernel", "gemm", 120, 10),
    event("kernel", "softmax", 300, 100),
    event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32", 150, 100),
    {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 1000},
]


def test_a_trace_is_read() -> None:
    reading = read_events(EVENTS)
    assert (reading.launches, reading.kernels) == (3, 4)
    assert reading.waits == {"cudaStreamSynchronize in aten::copy_": 1, "cudaDeviceSynchronize in no operation": 1}
    assert reading.reads == {"aten::_local_scalar_dense": 1}
    assert reading.copies == {"Memcpy HtoD (Pageable -> Device)": 1}
    assert reading.window == pytest.approx(300e-6)
    assert reading.busy == pytest.approx(250e-6)
    assert reading.sent == pytest.approx(100e-6)
    assert reading.hidden == pytest.approx(50e-6)
    told = reading.describe(1)
    assert "the device is busy for 83% of the time" in told
    assert told[-1] == "collectives take 0.0001 s, of which 50% beside other kernels"


def test_a_trace_without_a_device_is_read() -> None:
    reading = read_events([event("cpu_op", "aten::add", 0, 1)])
    assert (reading.kernels, reading.busy, reading.window) == (0, 0.0, 0.0)
    assert "no kernel ran on a device" in reading.describe(1)


def test_steps_of_a_run_are_profiled(tmp_path: Path) -> None:
    """On the CPU there are operations and no kernels; a step reads its gradient norm and what a pass gives back."""
    (reading,) = profile_steps("fsdp", tmp_path, device="cpu", ranks=1, size="tiny")
    assert reading.kernels == reading.launches == 0
    assert reading.reads["aten::_local_scalar_dense"] >= STEPS


def test_every_part_names_what_is_there() -> None:
    root = Path(__file__).parents[2]
    assert {record.name for record in Registry.discover().records("backend")} == set(BACKENDS)
    for part in list_parts(8):
        assert all((root / word).is_file() for word in part.command if word.endswith(".py"))
    assert {path.name for path in root.glob("plugins/*/tests/test_*_cuda.py")} <= {Path(path).name for path in list_marked_files()}


def test_a_part_that_fails_is_reported_with_its_words() -> None:
    (part, *_) = list_parts(1)
    good, section = run_part(type(part)("Odd", ("-c", "import sys; print('so far'); sys.exit('no device')")))
    assert not good
    assert "FAILED" in section
    assert "so far" in section
    assert "no device" in section


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_lists_what_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert "torch sees no CUDA device here" in told
    assert "test_fsdp_cuda.py::" in told
    assert all(f"A step of {backend}" in told for backend in BACKENDS)
