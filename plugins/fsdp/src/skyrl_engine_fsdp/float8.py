"""Linear layers that multiply in float8, by torchao: weights, gradients, sums and checkpoints stay as they are. Imports no torch by itself."""

from importlib.util import find_spec
from typing import Any, Final

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine_fsdp.options import FsdpConfig

_OFF: Final = 'Set backend.float8 = "off"'

ALIGNMENT: Final = 16
"""Numbers of a row that kernels of float8 take at a time; a layer with other widths stays in bfloat16."""

_ROUTERS: Final = ("gate", "router")
"""Last names of layers that choose experts: a choice flips on an error of float8."""

CAPABILITY: Final = (8, 9)
"""First compute capability of CUDA devices that multiply in float8 (Ada, Hopper)."""


def refuse_float8(options: FsdpConfig, model: ModelConfig) -> None:
    """Raise UnsupportedError for a model or a layout whose layers are not made for float8."""
    if options.float8 == "off":
        if options.float8_emulation:
            raise UnsupportedError(
                'backend.float8_emulation is about products in float8, and backend.float8 is "off"',
                remedy='Set backend.float8 to "rowwise", or remove backend.float8_emulation',
            )
        return
    chosen = f'backend.float8 = "{options.float8}"'
    if model.dtype != "bfloat16":
        raise UnsupportedError(
            f"{chosen} takes the place of products in bfloat16, and model.dtype is {model.dtype}",
            remedy=f'Set model.dtype = "bfloat16", or {_OFF[0].lower()}{_OFF[1:]}',
        )
    if options.tensor_parallel > 1:
        raise UnsupportedError(
            f"{chosen}, and layers that backend.tensor_parallel = {options.tensor_parallel} ranks divide multiply DTensors",
            remedy=f"Set backend.tensor_parallel = 1, or {_OFF[0].lower()}{_OFF[1:]}",
        )
    if options.context_parallel > 1:
        raise UnsupportedError(
            f"{chosen}, and no test shows that backend.context_parallel = {options.context_parallel} ranks compute the same with it",
            remedy=f"Set backend.context_parallel = 1, or {_OFF[0].lower()}{_OFF[1:]}",
        )
    if model.lora is not None:
        raise UnsupportedError(
            f"{chosen} replaces linear layers, and model.lora has wrapped them",
            remedy=f"Remove model.lora, or {_OFF[0].lower()}{_OFF[1:]}",
        )


def refuse_device(options: FsdpConfig, device: str) -> None:
    """Raise UnsupportedError where torchao is not installed, and where `device` ("cpu", "cuda:0") neither has products in float8 nor is to
    emulate them.
    """
    if options.float8 == "off":
        return
    if find_spec("torchao") is None:
        raise UnsupportedError(
            f'backend.float8 = "{options.float8}" needs the package torchao, which is not installed',
            remedy=f'Run pip install "skyrl-engine-fsdp[float8]", or {_OFF[0].lower()}{_OFF[1:]}',
        )
    if options.float8_emulation:
        return
    found = "ranks compute on the CPU"
    if device.startswith("cuda"):
        import torch

        capability = torch.cuda.get_device_capability(torch.device(device))
        if capability >= CAPABILITY:
            return
        found = f"{device} has {capability[0]}.{capability[1]}"
    raise UnsupportedError(
        f'backend.float8 = "{options.float8}" needs CUDA devices of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer, and {found}',
        remedy=f"{_OFF}, or, to see what its rounding does, backend.float8_emulation = true",
    )


def convert_layers(layers: list[Any], options: FsdpConfig) -> int:
    """Let the linear layers inside of `layers`, in place, multiply in float8 as the recipe says, and return how many do.

    Layers with widths that are no multiple of 16 and routers of experts stay as they are. Names and parameters are those of before.
    """
    if options.float8 == "off":
        return 0
    from dataclasses import replace

    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # tokens of a micro-batch are any number: they are padded to the alignment
    recipe = replace(Float8LinearConfig.from_recipe_name(options.float8), emulate=options.float8_emulation, pad_inner_dim=True)
    converted: list[str] = []

    def note_fitting(module: torch.nn.Module, name: str) -> bool:
        fits = type(module) is torch.nn.Linear and all(size % ALIGNMENT == 0 for size in module.weight.shape)
        if fits and name.rpartition(".")[2] not in _ROUTERS:
            converted.append(name)
            return True
        return False

    for layer in layers:
        convert_to_float8_training(layer, config=recipe, module_filter_fn=note_fitting)
    return len(converted)
