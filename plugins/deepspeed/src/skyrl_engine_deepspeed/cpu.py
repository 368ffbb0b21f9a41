"""What DeepSpeed needs to run without CUDA. Imported on CPU ranks alone."""

import os
import types


def choose_cpu() -> None:
    """Before the first import: DeepSpeed takes its accelerator from the environment, once per process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["DS_BUILD_OPS"] = "0"


def forgo_compiled_operations(ops: types.ModuleType) -> None:
    """After the import of `deepspeed.ops`: no operation counts as compatible.

    Else DeepSpeed probes compilers, and compiles a shared-memory collective for some two minutes; gloo does what that does.
    """
    ops.__dict__["__compatible_ops__"] = {}
