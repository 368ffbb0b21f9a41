"""AdamW whose moments are held in 8 bits: bitsandbytes' blockwise step (Dettmers et al. 2021, arXiv 2110.02861), over whole or divided weights.

256 consecutive numbers of a row share one scale, float32. Ranks divide a weight by whole rows, so that a block lies on one rank, and a step is
the same on any number of ranks.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.memory import EIGHT_BIT_BLOCK, FEWEST_IN_EIGHT_BITS
from skyrl_engine.modeling.low_bits import import_functional, list_code_values
from skyrl_engine.modeling.parameter_steps import ParameterSteps, local_part

IN_A_LAYER: Final = re.compile(r"\.\d+\.")
"""A numbered part of a parameter's name: only the layers of a model have one."""
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
SCALE: Final = "_absmax"
"""Suffix of a moment's scales: the largest absolute value of each block."""


def has_eight_bit_moments(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix of a numbered layer whose rows are whole blocks, and which is not small."""
    return (
        parameter.ndim >= 2
        and IN_A_LAYER.search(name) is not None
        and parameter.shape[-1] % EIGHT_BIT_BLOCK == 0
        and parameter.numel() >= FEWEST_IN_EIGHT_BITS
    )


def make_zero_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step: codes uint8 [..., n] and scales float32 [..., n / 256] of both moments.

    They are divided among ranks as the parameter is.
    """
    state = {"step": torch.zeros((), dtype=torch.float32)}
    for name in MOMENTS:
        state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
        state[name + SCALE] = _make_zero_scales(parameter)
    return state


def _make_zero_scales(parameter: Tensor) -> Tensor:
    local = local_part(parameter)
    scales = torch.zeros((*local.shape[:-1], local.shape[-1] // EIGHT_BIT_BLOCK), dtype=torch.float32, device=local.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // EIGHT_BIT_BLOCK))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(scales, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=strides)


class EightBitAdamW(ParameterSteps):
    """Bitsandbytes' step of AdamW over parameters with `has_eight_bit_moments`; nothing is sent.

    Raises UnsupportedError where bitsandbytes is not installed, and for parameters in float64, which it does not step.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self._functional = import_functional('optimizer.use = "adamw_8bit"', 'set optimizer.use = "adamw"')
        super().__init__(groups, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        if any(parameter.dtype == torch.float64 for group in self.param_groups for parameter in group["params"]):
            raise UnsupportedError(
                'optimizer.use = "adamw_8bit" steps in float32, and the weights are in float64',
                remedy='Set model.dtype = "float32" or "bfloat16", or optimizer.use = "adamw"',
            )

    def _step_one(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state.update(make_zero_moments(parameter))
        state["step"] += 1
        assert parameter.grad is not None, "only parameters with a gradient are stepped"
        weight, gradient = local_part(parameter.detach()), local_part(parameter.grad).contiguous()
        # a rank may have no row of a small matrix
        if weight.numel() == 0:
            return
        stepped = weight.contiguous()
        (first, first_scales), (second, second_scales) = (
            (local_part(state[name]), local_part(state[name + SCALE]).view(-1)) for name in MOMENTS
        )
        beta1, beta2 = group["betas"]
        self._functional.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            stepped,
            first,
            second,
            beta1,
            beta2,
            0.0,  # beta3 and alpha are AdEMAMix's
            0.0,
            group["eps"],
            int(state["step"]),
            group["lr"],
            list_code_values(weight.device, signed=True),
            list_code_values(weight.device, signed=False),
            first_scales,
            second_scales,
            group["weight_decay"],
        )
        if stepped is not weight:
            weight.copy_(stepped)
