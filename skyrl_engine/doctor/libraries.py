"""Torch with its devices, and Ray."""

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from skyrl_engine.doctor.finding import DoctorFinding
from skyrl_engine.model_facts.memory import format_bytes
from skyrl_engine.registry.known import install_command

_DRIVER = Path("/proc/driver/nvidia/version")


def examine_torch() -> Iterator[DoctorFinding]:
    """Yield torch, what it was built for, its devices, and what ranks on them exchange gradients with."""
    import torch
    import torch.distributed as dist

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPUs"
    yield DoctorFinding("torch", "ok", f"{torch.__version__}, built for {built}")
    if torch.cuda.is_available():
        yield from _examine_devices()
    elif _DRIVER.exists():
        where = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no device with it"
        remedy = (
            "Check CUDA_VISIBLE_DEVICES and that the driver is as new as torch's CUDA"
            if torch.version.cuda
            else "Install torch for CUDA"
        )
        yield DoctorFinding("device", "problem", f"an NVIDIA driver is loaded, and {where}", remedy)
    else:
        yield DoctorFinding("device", "ok", "no accelerator: training is on the CPU")
    if not dist.is_available() or not dist.is_gloo_available():
        yield DoctorFinding(
            "gloo",
            "problem",
            "this torch has no gloo, with which ranks exchange what lies on the CPU",
            "Install torch from its own index",
        )
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and not threads.isdigit():
        yield DoctorFinding("threads", "warning", f"OMP_NUM_THREADS is {threads!r}", "Set it to a number, or unset it")


def _examine_devices() -> Iterator[DoctorFinding]:
    from torch import cuda, distributed

    for index in range(cuda.device_count()):
        facts = cuda.get_device_properties(index)
        free, total = cuda.mem_get_info(index)
        found = f"{facts.name}, {format_bytes(free)} of {format_bytes(total)} free"
        if free < total // 2:
            yield DoctorFinding(f"device {index}", "warning", found, "End what else uses it: `nvidia-smi` lists it")
        else:
            yield DoctorFinding(f"device {index}", "ok", found)
    if not cuda.is_bf16_supported(including_emulation=False):
        remedy = 'Set model.dtype = "float32" or "float16"'
        yield DoctorFinding(
            "bfloat16", "warning", 'this device does not compute in it, and model.dtype = "auto" chooses it', remedy
        )
    if distributed.is_nccl_available():
        version_of_nccl: tuple[int, ...] = cuda.nccl.version()  # type: ignore[no-untyped-call] # torch leaves it untyped
        yield DoctorFinding("NCCL", "ok", ".".join(map(str, version_of_nccl)))
    else:
        yield DoctorFinding(
            "NCCL", "problem", "this torch has none, so several ranks cannot use GPUs", "Install torch for CUDA from its own index"
        )


def examine_ray() -> Iterator[DoctorFinding]:
    """Yield Ray, which starts several ranks."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        remedy = f"For several ranks, install it: {install_command('skyrl-engine[ray]')}"
        yield DoctorFinding("ray", "warning", "it is not installed: one rank works, several do not", remedy)
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        remedy = "Set run.ray_address to join that cluster: the engine starts its own where a configuration names none"
        yield DoctorFinding("ray", "warning", f"{found}; RAY_ADDRESS is set, and is not read", remedy)
    else:
        yield DoctorFinding("ray", "ok", found)
