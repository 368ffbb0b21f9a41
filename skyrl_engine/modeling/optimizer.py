"""AdamW as every backend uses it: weight decay on matrices only."""

from collections.abc import Iterable

import torch
from torch import nn

from skyrl_engine.contracts.backend import OptimizerSpec


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters in two groups: with two or more dimensions (decayed), and the rest: norms and biases (not decayed)."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_adamw(parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over `parameters`; the caller sets each group's "lr" from the schedule before a step.

    Fused: one kernel per step, and no temporaries as large as the weights.
    """
    groups = parameter_groups(parameters, spec.weight_decay)
    return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.epsilon, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in every parameter group from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
