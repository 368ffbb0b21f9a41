"""Settings that let DeepSpeed run without CUDA. Only ranks on the CPU import this module."""

import os
import types
from typing import Any

import torch


def choose_cpu() -> None:
    """Choose the CPU accelerator; call it before DeepSpeed's first import, which reads the environment once per process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["DS_BUILD_OPS"] = "0"


def use_device(accelerator: Any, device: torch.device) -> None:
    """Let DeepSpeed make its tensors on the rank's device by its own name, "cpu:1" say, as it does on CUDA."""
    accelerator.current_device_name = lambda: str(device)


def forgo_compiled_operations(ops: types.ModuleType) -> None:
    """Mark every compiled operation as incompatible; call it after the import of `deepspeed.ops`.

    Otherwise DeepSpeed probes compilers and spends about two minutes on compiling a shared-memory collective that gloo replaces.
    """
    ops.__dict__["__compatible_ops__"] = {}
