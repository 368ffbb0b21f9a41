"""AdamW as every backend uses it: weight decay on matrices only."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from skyrl_engine.contracts.kinds.backend import AdamWSettings

DECAYED = "decayed"
"""Key of a parameter group: whether weight decay is of its parameters."""


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters in groups: those with two or more dimensions (decayed), and the rest: norms and biases (not decayed).

    Both are split by the device mesh that a distributed parameter lies on: one fused step takes those of one mesh alone.
    """
    members: defaultdict[tuple[bool, object], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            members[parameter.ndim >= 2, getattr(parameter, "device_mesh", None)].append(parameter)
    return [
        {"params": chosen, DECAYED: decayed, "weight_decay": weight_decay if decayed else 0.0}
        for decayed in (True, False)
        for (kind, _), chosen in members.items()
        if kind is decayed
    ]


def build_adamw(parameters: Iterable[nn.Parameter], settings: AdamWSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over `parameters`. Fused: one kernel per step, and no temporaries as large as the weights."""
    groups = parameter_groups(parameters, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True)


def use_settings(optimizer: torch.optim.Optimizer, settings: AdamWSettings) -> None:
    """Step with these numbers from now on. Clipping is not the optimizer's."""
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate
        group["betas"] = settings.betas
        group["eps"] = settings.epsilon
        group["weight_decay"] = settings.weight_decay if group[DECAYED] else 0.0
