"""Refuse a way of computing that the machine of a run's ranks does not have, where all ranks are on this machine."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from skyrl_engine.config.schema import ModelConfig, OptimizerConfig, RunConfig
from skyrl_engine.contracts.kinds.backend import BackendDescription, refuse_no_device
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.engine.cpu_check import starts_ray_here
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.workers.process_group import pick_device

_OPTIMIZER_PACKAGES: Final[Mapping[str, tuple[str, str, str]]] = {
    "lion": ("lion_pytorch", "lion-pytorch", "lion"),
    "adamw_8bit": ("bitsandbytes", "bitsandbytes", "bitsandbytes"),
}
"""Module, package and extra of optimizers that torch does not have."""


def refuse_absent_packages(optimizer: OptimizerConfig, run: RunConfig) -> None:
    """Raise UnsupportedError for an optimizer whose package is not installed; on a cluster that runs already, ranks refuse it."""
    if optimizer.use not in _OPTIMIZER_PACKAGES or (run.launch == "ray" and not starts_ray_here(run)):
        return
    module, package, extra = _OPTIMIZER_PACKAGES[optimizer.use]
    if find_spec(module) is None:
        raise UnsupportedError(
            f'optimizer.use = "{optimizer.use}" needs the package {package}, which is not installed',
            remedy=f'Run pip install "skyrl-engine[{extra}]", or choose another optimizer',
        )


def refuse_absent_kernels(model: ModelConfig, run: RunConfig, rows: RowKind) -> None:
    """Raise UnsupportedError for `model.compile` without a compiler, and for what does not run here: a kernel of `model.attention`, TF32.

    On a cluster that runs already, ranks refuse it when they load the model: the controller's machine may be another one than theirs.
    """
    plain = not model.compile and model.attention == "auto" and run.matmul_precision == "highest"
    if plain or (run.launch == "ray" and not starts_ray_here(run)):
        return
    from skyrl_engine.modeling.device_check import refuse_on_device
    from skyrl_engine.modeling.matmul_precision import refuse_matmul_precision

    device = pick_device(run.device, 0)
    refuse_on_device(model, device, rows)
    refuse_matmul_precision(run.matmul_precision, model.dtype, device)


def refuse_absent_device(described: BackendDescription, model: ModelConfig, run: RunConfig) -> None:
    """Raise the UnsupportedError of a backend whose options need another device than its ranks have.

    On a cluster that runs already, ranks refuse it when they load the model.
    """
    if described.refuse_device is refuse_no_device or (run.launch == "ray" and not starts_ray_here(run)):
        return
    described.refuse_device(model, pick_device(run.device, 0))


def describe_compiling(model: ModelConfig) -> str:
    """Return what `model.compile` costs, as a clause of a plan; empty for a model that is not compiled."""
    return (
        "the first step compiles the layers, which takes a minute or so; its metric compile_seconds says how long"
        if model.compile
        else ""
    )
