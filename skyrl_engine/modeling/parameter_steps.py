"""Optimizers that step one parameter after the other, each by a rule of its own: what they share."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class ParameterSteps(torch.optim.Optimizer):
    """An optimizer whose step is that of each parameter with a gradient, in the order of its groups."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # no caller has a closure
        """Take one step with the gradients that are there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter)

    @abstractmethod
    def _step_one(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        """Take the step of one parameter, whose gradient is there, with the settings of its group."""


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that ranks may divide."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
