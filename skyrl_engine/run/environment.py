"""Facts about the machine and the installed libraries that a run's numbers may depend on."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "ray", "numpy", "datasets", "tokenizers", "safetensors", "pluggy")


def describe_environment() -> dict[str, Any]:
    """Python, platform, library versions (None where not installed), processor and accelerators. Names no user and no host."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "usable_cores": usable_cores()},
        "accelerators": _accelerators(),
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def usable_cores() -> int | None:
    """Cores this process may run on, where the platform can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> list[dict[str, Any]]:
    """CUDA devices this process sees; asked only of a torch that is loaded already, so that a manifest never loads it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": value.name, "memory_bytes": value.total_memory, "cuda": torch.version.cuda} for value in properties]
