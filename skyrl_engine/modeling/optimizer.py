"""The optimizers of backends, with weight decay on matrices only."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from skyrl_engine.contracts.kinds.backend import AdamWSettings, OptimizerSettings
from skyrl_engine.errors import UnsupportedError

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


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return the optimizer that `settings` are of, over `parameters`: torch's, fused, which needs no temporaries as large as the weights."""
    groups = parameter_groups(parameters, settings.weight_decay)
    if isinstance(settings, AdamWSettings):
        return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon, fused=True)
    return torch.optim.SGD(groups, lr=settings.learning_rate, fused=True)


def use_settings(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
    """Use these settings from the next step on; the backend clips, not the optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate
        group["weight_decay"] = settings.weight_decay if group[DECAYED] else 0.0
        if isinstance(settings, AdamWSettings):
            group["betas"] = settings.betas
            group["eps"] = settings.epsilon


def make_zero_state(settings: OptimizerSettings, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what the optimizer keeps of a parameter that it has stepped, in zeros, for a checkpoint to fill; empty where it keeps nothing."""
    if not isinstance(settings, AdamWSettings):
        return {}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def require_adamw(settings: OptimizerSettings | None, backend: str) -> AdamWSettings | None:
    """Return settings of AdamW as they are. Raises UnsupportedError, naming the backend, for those of another optimizer."""
    if settings is None or isinstance(settings, AdamWSettings):
        return settings
    raise UnsupportedError(
        f"backend {backend} steps by adamw alone, and the settings are of {settings.use}",
        remedy='Set optimizer.use = "adamw", or choose another backend, such as fsdp',
    )
