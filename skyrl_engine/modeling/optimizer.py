"""The AdamW optimizer of every backend, with weight decay on matrices only."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from skyrl_engine.contracts.kinds.backend import AdamWSettings

DECAYED = "decayed"
"""Key of a parameter group that is True if weight decay applies to its parameters."""


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Return the trainable parameters in groups: those of two or more dimensions, which decay, and the rest (norms, biases), which do not.

    Both are split by the device mesh of distributed parameters, because a fused step takes parameters of a single mesh.
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
    """Return a fused AdamW (Loshchilov and Hutter 2019) over `parameters`, which needs no temporaries as large as the weights."""
    groups = parameter_groups(parameters, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True)


def use_settings(optimizer: torch.optim.Optimizer, settings: AdamWSettings) -> None:
    """Use these settings from the next step on; the backend clips, not the optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate
        group["betas"] = settings.betas
        group["eps"] = settings.epsilon
        group["weight_decay"] = settings.weight_decay if group[DECAYED] else 0.0
