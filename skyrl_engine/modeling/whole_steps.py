"""Optimizers whose step needs whole matrices, over parameters that ranks divide among them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from skyrl_engine.modeling.parameter_steps import ParameterSteps, local_part


class WholeSteps(ParameterSteps):
    """Steps of `kind`, an optimizer of torch, over distributed parameters; its groups are those of `kind`.

    Every rank gathers one parameter after the other with its gradient and state, takes the step on the whole, and keeps its own part. So the
    numbers are those of a single rank, and no more than one parameter is whole at a time. State of a parameter's shape is divided as the
    parameter is; other state, such as one number per row, is whole on every rank.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], kind: Callable[..., torch.optim.Optimizer], **numbers: Any) -> None:
        made = kind(groups, **numbers)
        super().__init__(made.param_groups, {})
        self._kind = kind

    def _step_one(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        whole = nn.Parameter(_gather(parameter.detach()))
        whole.grad = _gather(parameter.grad)
        optimizer = self._kind([{**group, "params": [whole]}])
        state = self.state[parameter]
        optimizer.state[whole].update({name: _gather(value) for name, value in state.items()})
        optimizer.step()
        local_part(parameter.detach()).copy_(local_part(_divide(whole.detach(), parameter)))
        state.update(
            {
                name: _divide(value, parameter) if value.shape == whole.shape else value
                for name, value in optimizer.state[whole].items()
            }
        )


def _gather(tensor: Tensor | None) -> Tensor:
    """Return the whole tensor, in memory of its own, on every rank."""
    assert tensor is not None, "only parameters with a gradient are stepped"
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def _divide(whole: Tensor, like: Tensor) -> Tensor:
    """Return the whole tensor, equal on every rank, as a distributed one that is divided as `like`; nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, like.placements)
