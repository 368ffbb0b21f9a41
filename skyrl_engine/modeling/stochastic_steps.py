"""AdamW over weights in bfloat16 without float32 master weights: the result of a step is rounded up or down at random.

A number between two neighbours of bfloat16 becomes the upper one with the probability of its distance from the lower one, so that its mean is
the number itself, and small updates add up on average; rounding to the nearest would lose them (Gupta et al. 2015, arXiv 1502.02551, eq. 2).
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from skyrl_engine.modeling.parameter_steps import ParameterSteps, local_part

_LOWER_BITS = 16
"""bfloat16 is the upper half of float32."""


def round_stochastically(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 numbers to bfloat16, up or down at random; those that bfloat16 holds stay, and so do infinities and NaN.

    A uniform number of 16 bits is added to the lower half of the bits, which carries with the probability that this half is of a whole.
    """
    bits = numbers.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << _LOWER_BITS, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = ((bits + noise) >> _LOWER_BITS << _LOWER_BITS).view(torch.float32)
    return torch.where(numbers.isfinite(), rounded, numbers).to(torch.bfloat16)


class StochasticAdamW(ParameterSteps):
    """AdamW over parameters in bfloat16, with gradients and moments in float32; nothing is sent.

    What is drawn follows from `seed`, the parameter's name, its step and the place of the shard: a resumed run draws the same, and copies of a
    shard on several ranks stay equal. Another layout of ranks draws other numbers.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], names: Mapping[int, str], seed: int) -> None:
        """Step the parameters of `groups`, whose names are in `names` by `id`."""
        super().__init__(groups, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        self._names, self._seed = names, seed

    def _step_one(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        """Take the step of torch.optim.AdamW in float32, and round where it ends."""
        state = self.state[parameter]
        if not state:
            state.update(make_zero_float32_moments(parameter))
        state["step"] += 1
        assert parameter.grad is not None, "only parameters with a gradient are stepped"
        weight, gradient = local_part(parameter.detach()), local_part(parameter.grad).float()
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        step = int(state["step"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (second.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        stepped = weight.float().mul_(1 - group["lr"] * group["weight_decay"])
        stepped.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))
        weight.copy_(round_stochastically(stepped, self._make_generator(parameter, step, weight.device)))

    def _make_generator(self, parameter: nn.Parameter, step: int, device: torch.device) -> torch.Generator:
        """Return what draws the bits of one step of one shard."""
        key = f"{self._seed} {self._names[id(parameter)]} {step} {_find_place(parameter)}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
        return torch.Generator(device).manual_seed(seed)


def make_zero_float32_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return what is kept of a parameter that was stepped, in zeros."""
    moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32), **moments}


def _find_place(parameter: Tensor) -> tuple[int, ...]:
    """Return the place of this rank's shard among those that differ; copies of one have one place."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    places = enumerate(parameter.placements)
    return tuple(mesh.get_local_rank(dimension) for dimension, placement in places if not isinstance(placement, Replicate))
