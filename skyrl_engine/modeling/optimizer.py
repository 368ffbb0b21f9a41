"""AdamW as every backend uses it: weight decay on matrices only."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from skyrl_engine.contracts.kinds.backend import OptimizerSpec


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters in groups: those with two or more dimensions (decayed), and the rest: norms and biases (not decayed).

    Both are split by the device mesh that a distributed parameter lies on: one fused step takes those of one mesh alone.
    """
    members: defaultdict[tuple[bool, object], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            members[parameter.ndim >= 2, getattr(parameter, "device_mesh", None)].append(parameter)
    return [
        {"params": chosen, "weight_decay": weight_decay if decayed else 0.0}
        for decayed in (True, False)
        for (kind, _), chosen in members.items()
        if kind is decayed
    ]


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
