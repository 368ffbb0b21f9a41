"""The optimizers of backends, with weight decay on matrices only."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn

from skyrl_engine.contracts.kinds.optimizer_settings import (
    AdafactorSettings,
    AdamW8BitSettings,
    AdamWSettings,
    LionSettings,
    MuonSettings,
    OptimizerSettings,
    ParameterGroup,
    SgdSettings,
)
from skyrl_engine.errors import ConfigError, Problem, UnsupportedError
from skyrl_engine.modeling.eight_bit_steps import IN_A_LAYER, EightBitAdamW, has_eight_bit_moments, make_zero_moments
from skyrl_engine.modeling.stochastic_steps import StochasticAdamW, make_zero_float32_moments
from skyrl_engine.modeling.whole_steps import WholeSteps

logger = logging.getLogger(__name__)

DECAYED = "decayed"
"""Key of a parameter group that is True if weight decay applies to its parameters."""

RATE_FACTOR: Final = "rate_factor"
OWN_DECAY: Final = "own_decay"
"""Keys of a parameter group for the numbers of its `ParameterGroup`: the factor of the learning rate, and a weight decay or None."""

_NUMBERS: Final[Mapping[str, str]] = {"betas": "betas", "epsilon": "eps", "momentum": "momentum"}
"""Numbers of settings by the key that they have in parameter groups of torch; rate and weight decay go by the group."""


def parameter_groups(
    parameters: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    groups: Sequence[ParameterGroup] = (),
) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups: those of two or more dimensions, which decay, and the rest (norms, biases), which do not.

    Several may have one name. Both are split by the first of `groups` that matches, and by the device mesh of distributed parameters, because a
    fused step takes parameters of a single mesh.
    """
    members: defaultdict[tuple[bool, ParameterGroup | None, object], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters.items() if isinstance(parameters, Mapping) else parameters:
        if parameter.requires_grad:
            mesh = getattr(parameter, "device_mesh", None)
            members[parameter.ndim >= 2, find_group(name, groups), mesh].append(parameter)
    return [
        {
            "params": chosen,
            DECAYED: decayed,
            RATE_FACTOR: 1.0 if group is None else group.rate_factor,
            OWN_DECAY: None if group is None else group.weight_decay,
            "weight_decay": weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
        for (kind, group, _), chosen in members.items()
        if kind is decayed
    ]


def find_group(name: str, groups: Sequence[ParameterGroup]) -> ParameterGroup | None:
    """Return the first group that matches a parameter's name."""
    return next((group for group in groups if fnmatchcase(name, group.match)), None)


def refuse_empty_groups(parameters: Collection[str], groups: Sequence[ParameterGroup]) -> None:
    """Raise ConfigError for a group that matches none of the trained parameters' names, or none that an earlier group leaves."""
    chosen = {name: find_group(name, groups) for name in parameters}
    problems = []
    for number, group in enumerate(groups):
        if all(other is not group for other in chosen.values()):
            taken = any(fnmatchcase(name, group.match) for name in parameters)
            cause = "groups before it have all parameters that it matches" if taken else "it matches no parameter that is trained"
            example = next(iter(parameters), "")
            problems.append(
                Problem(f"optimizer.groups[{number}].match", f"{group.match!r}: {cause}", f"Match names such as {example}")
            )
    if problems:
        raise ConfigError(problems)


def build_optimizer(parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, *, seed: int = 0) -> torch.optim.Optimizer:
    """Return the optimizer that `settings` are of, over `parameters` by name; it needs no temporaries as large as all weights.

    `seed` is that of the run, from which stochastic rounding draws.
    Raises UnsupportedError for a package that is not installed, and for Muon over a model without a matrix that it steps.
    """
    optimizer = _build(parameters, settings, seed)
    use_settings(optimizer, settings)
    return optimizer


def build_adamw(parameters: Iterable[tuple[str, nn.Parameter]], settings: AdamWSettings) -> torch.optim.Optimizer:
    """Return AdamW over parts of parameters, of which several may have one parameter's name, and which may be none."""
    groups = parameter_groups(parameters, settings.weight_decay, settings.groups)
    nothing = {"params": [], DECAYED: True, RATE_FACTOR: 1.0, OWN_DECAY: None}
    optimizer = torch.optim.AdamW(groups or [nothing], fused=True)
    use_settings(optimizer, settings)
    return optimizer


def _build(parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings, seed: int) -> torch.optim.Optimizer:
    if isinstance(settings, MuonSettings):
        return _build_muon(parameters, settings)
    if isinstance(settings, AdamW8BitSettings):
        return _build_eight_bit(parameters, settings)
    groups = parameter_groups(parameters, settings.weight_decay, settings.groups)
    if isinstance(settings, AdamWSettings) and settings.stochastic_rounding:
        return StochasticAdamW(groups, {id(parameter): name for name, parameter in parameters.items()}, seed)
    if isinstance(settings, AdamWSettings):
        return torch.optim.AdamW(groups, fused=True)
    if isinstance(settings, SgdSettings):
        # one parameter after the other: torch 2.13 has no fused step of SGD for distributed parameters
        return torch.optim.SGD(groups, foreach=False)
    if isinstance(settings, AdafactorSettings):
        return _build_whole(groups, torch.optim.Adafactor, foreach=False)
    try:
        from lion_pytorch import Lion
    except ImportError as error:
        raise UnsupportedError(
            'optimizer.use = "lion" needs the package lion-pytorch',
            remedy="Install skyrl-engine[lion], or choose another optimizer",
        ) from error
    lion: torch.optim.Optimizer = Lion(groups)
    return lion


def _build_muon(parameters: Mapping[str, nn.Parameter], settings: MuonSettings) -> torch.optim.Optimizer:
    hidden = {name: parameter for name, parameter in parameters.items() if is_stepped_by_muon(name, parameter)}
    groups = parameter_groups(hidden, settings.weight_decay, settings.groups)
    if not groups:
        raise UnsupportedError(
            "muon steps the matrices of a model's layers, and none of them is trained", remedy='Set optimizer.use = "adamw"'
        )
    muon = _build_whole(groups, torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    return _step_others_by_adamw(muon, hidden, parameters, settings)


def _build_eight_bit(parameters: Mapping[str, nn.Parameter], settings: AdamW8BitSettings) -> torch.optim.Optimizer:
    chosen = {name: parameter for name, parameter in parameters.items() if has_eight_bit_moments(name, parameter)}
    groups = parameter_groups(chosen, settings.weight_decay, settings.groups)
    counts = [sum(parameter.numel() for parameter in some.values() if parameter.requires_grad) for some in (chosen, parameters)]
    logger.info("adamw_8bit holds the moments of %d of %d numbers in 8 bits, and those of the others in 32", *counts)
    eight_bit = EightBitAdamW(groups) if groups else None
    return _step_others_by_adamw(eight_bit, chosen, parameters, settings)


def _step_others_by_adamw(
    optimizer: torch.optim.Optimizer | None,
    chosen: Collection[str],
    parameters: Mapping[str, nn.Parameter],
    settings: OptimizerSettings,
) -> torch.optim.Optimizer:
    """Return `optimizer`, which steps the `chosen` parameters (None: there are none), with AdamW for all others."""
    others = {name: parameter for name, parameter in parameters.items() if name not in chosen}
    groups = parameter_groups(others, settings.weight_decay, settings.groups)
    if not groups and optimizer is not None:
        return optimizer
    adamw = torch.optim.AdamW(groups, fused=True)
    return adamw if optimizer is None else WithAdamW(optimizer, adamw)


def is_stepped_by_muon(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix of a numbered layer: neither an embedding nor a head, and no experts that are one tensor of three dimensions."""
    return parameter.ndim == 2 and IN_A_LAYER.search(name) is not None


def _build_whole(groups: list[dict[str, Any]], kind: type[torch.optim.Optimizer], **numbers: Any) -> torch.optim.Optimizer:
    is_divided = any(hasattr(parameter, "device_mesh") for group in groups for parameter in group["params"])
    return WholeSteps(groups, kind, **numbers) if is_divided else kind(groups, **numbers)


class WithAdamW(torch.optim.Optimizer):
    """An optimizer for some parameters and AdamW for all others, as one optimizer with one state."""

    def __init__(self, optimizer: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        super().__init__([*optimizer.param_groups, *adamw.param_groups], {})
        # the same groups and the same state, whoever changes them
        optimizer.state = adamw.state = self.state
        self._parts = (optimizer, adamw)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # no caller has a closure
        """Take one step with the gradients that are there."""
        for part in self._parts:
            part.step()


def use_settings(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
    """Use these settings from the next step on, but for their groups, which are those of the start; the backend clips, not the optimizer."""
    for group in optimizer.param_groups:
        decay = settings.weight_decay if group[OWN_DECAY] is None else group[OWN_DECAY]
        group["weight_decay"] = decay if group[DECAYED] else 0.0
        for name, key in _NUMBERS.items():
            # the eps of groups without betas is a constant of Muon's and Adafactor's own
            if hasattr(settings, name) and key in group and (key != "eps" or "betas" in group):
                group[key] = getattr(settings, name)
        group["lr"] = settings.learning_rate * group[RATE_FACTOR]


def make_zero_state(settings: OptimizerSettings, name: str, parameter: Tensor) -> dict[str, Tensor]:
    """Return what the optimizer keeps of a parameter that it has stepped, in zeros, for a checkpoint to fill; empty where it keeps nothing."""
    if isinstance(settings, SgdSettings):
        return {}
    if isinstance(settings, LionSettings):
        return {"exp_avg": torch.zeros_like(parameter)}
    if isinstance(settings, MuonSettings) and is_stepped_by_muon(name, parameter):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    if isinstance(settings, AdafactorSettings):
        return _make_zero_factors(parameter)
    if isinstance(settings, AdamW8BitSettings) and has_eight_bit_moments(name, parameter):
        return make_zero_moments(parameter)
    if isinstance(settings, AdamWSettings) and settings.stochastic_rounding:
        return make_zero_float32_moments(parameter)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _make_zero_factors(parameter: Tensor) -> dict[str, Tensor]:
    """Return Adafactor's state: the second moment of a vector, or its factors, one number per row and per column of a matrix."""
    step = {"step": torch.zeros((), dtype=torch.float32)}
    if parameter.ndim < 2:
        return {**step, "variance": torch.zeros_like(parameter)}
    shapes = {"row_var": (*parameter.shape[:-1], 1), "col_var": (*parameter.shape[:-2], 1, parameter.shape[-1])}
    return {
        **step,
        **{
            # as `WholeSteps` divides it
            name: torch.zeros_like(parameter)
            if shape == tuple(parameter.shape)
            else torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            for name, shape in shapes.items()
        },
    }


def require_adamw(settings: OptimizerSettings | None, backend: str, *, groups: bool = False) -> AdamWSettings | None:
    """Return settings of AdamW as they are.

    Raises UnsupportedError, naming the backend, for those of another optimizer or with stochastic rounding, and for those with groups if it
    does not take `groups`.
    """
    if settings is not None and settings.groups and not groups:
        raise UnsupportedError(
            f"backend {backend} has one learning rate and one weight decay, and the settings have groups of parameters",
            remedy="Remove optimizer.groups, or choose another backend, such as fsdp",
        )
    if isinstance(settings, AdamWSettings) and settings.stochastic_rounding:
        raise UnsupportedError(
            f"backend {backend} steps float32 master weights, and the settings round weights in bfloat16 at random",
            remedy="Remove optimizer.stochastic_rounding, or choose another backend, such as fsdp",
        )
    if settings is None or isinstance(settings, AdamWSettings):
        return settings
    raise UnsupportedError(
        f"backend {backend} steps by adamw alone, and the settings are of {settings.use}",
        remedy='Set optimizer.use = "adamw", or choose another backend, such as fsdp',
    )
