"""The numbers of an optimizer's step, by optimizer. The import of this file needs no torch."""

from collections.abc import Mapping
from typing import ClassVar, cast

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, lt, max_len, min_len, optional


@frozen
class ParameterGroup:
    """Parameters whose names match, with numbers of their own; a parameter is in the first group that matches it.

    `match` is a pattern of whole Hugging Face names, as `fnmatch.fnmatchcase` takes it. They learn at `rate_factor` times the learning rate of
    the step, and matrices among them decay by `weight_decay` (None: as all others).
    """

    match: str
    rate_factor: float = field(default=1.0, validator=[ge(0), lt(float("inf"))])
    weight_decay: float | None = field(default=cast("float | None", None), validator=optional(and_(ge(0), lt(float("inf")))))


def _ema_decay() -> "float | None":
    """Return the field `ema_decay` of settings."""
    return field(default=cast("float | None", None), validator=optional(and_(gt(0), lt(1))))


@frozen
class _NumbersOfAdamW:
    learning_rate: float = field(default=1e-5, validator=[ge(0), lt(float("inf"))])
    betas: tuple[float, float] = field(
        default=(0.9, 0.999), validator=deep_iterable(and_(ge(0.0), lt(1.0)), and_(min_len(2), max_len(2)))
    )
    epsilon: float = field(default=1e-8, validator=gt(0))
    weight_decay: float = field(default=0.0, validator=[ge(0), lt(float("inf"))])
    max_grad_norm: float | None = field(default=cast("float | None", 1.0), validator=optional(gt(0)))
    groups: tuple[ParameterGroup, ...] = ()
    ema_decay: float | None = _ema_decay()


@frozen
class AdamWSettings(_NumbersOfAdamW):
    """The numbers of AdamW (Loshchilov and Hutter 2019), which may be others at every step.

    `weight_decay` is decoupled and of matrices alone: parameters of two or more dimensions. Gradients are scaled down to the norm
    `max_grad_norm` where theirs is larger; None: never, and the norm is still reported. `groups` have numbers of their own, those of `setup` at
    every step; with the capability `parameter_groups`, as for every optimizer. `ema_decay`, that of `setup` at every step too and with the
    capability `ema`, is the decay of the averages that `KeepsAverages` has; None: no averages. With `stochastic_rounding`, that of
    `setup` at every step and with the capability of that name, trained weights are held in bfloat16 alone, and what a step makes of them is
    rounded up or down at random, so that its mean is what float32 would hold; gradients and moments are float32.
    """

    use: ClassVar[str] = "adamw"
    stochastic_rounding: bool = False


@frozen
class AdamW8BitSettings(_NumbersOfAdamW):
    """The numbers of AdamW with moments in 8 bits (Dettmers et al. 2021, arXiv 2110.02861), which may be others at every step.

    Matrices of numbered layers whose rows are multiples of 256 numbers, 4,096 numbers at least, have such moments, with one scale for each 256;
    embeddings, the head and all others step by AdamW in 32 bits. Numbers as in `AdamWSettings`.
    """

    use: ClassVar[str] = "adamw_8bit"


@frozen
class SgdSettings:
    """The numbers of stochastic gradient descent (Robbins and Monro 1951), which may be others at every step. It keeps no moments.

    A step moves a parameter by -learning_rate * (gradient + weight_decay * parameter); `weight_decay` and `max_grad_norm` as in
    `AdamWSettings`.
    """

    use: ClassVar[str] = "sgd"
    learning_rate: float = field(default=1e-5, validator=[ge(0), lt(float("inf"))])
    weight_decay: float = field(default=0.0, validator=[ge(0), lt(float("inf"))])
    max_grad_norm: float | None = field(default=cast("float | None", 1.0), validator=optional(gt(0)))
    groups: tuple[ParameterGroup, ...] = ()
    ema_decay: float | None = _ema_decay()


@frozen
class AdafactorSettings:
    """The numbers of Adafactor (Shazeer and Stern 2018) in the form of torch.optim.Adafactor, which may be others at every step.

    It keeps one number per row and per column of a matrix in the place of moments. `learning_rate` bounds the relative step: a step moves a
    parameter by min(learning_rate, 1 / sqrt(step)) times its root mean square, which is at least 0.001. `weight_decay` and `max_grad_norm` as
    in `AdamWSettings`.
    """

    use: ClassVar[str] = "adafactor"
    learning_rate: float = field(default=1e-5, validator=[ge(0), lt(float("inf"))])
    weight_decay: float = field(default=0.0, validator=[ge(0), lt(float("inf"))])
    max_grad_norm: float | None = field(default=cast("float | None", 1.0), validator=optional(gt(0)))
    groups: tuple[ParameterGroup, ...] = ()
    ema_decay: float | None = _ema_decay()


@frozen
class LionSettings:
    """The numbers of Lion (Chen et al. 2023, algorithm 2), which may be others at every step. It keeps one moment.

    A step moves every number by `learning_rate`, up or down. `weight_decay` and `max_grad_norm` as in `AdamWSettings`.
    """

    use: ClassVar[str] = "lion"
    learning_rate: float = field(default=1e-5, validator=[ge(0), lt(float("inf"))])
    betas: tuple[float, float] = field(
        default=(0.9, 0.99), validator=deep_iterable(and_(ge(0.0), lt(1.0)), and_(min_len(2), max_len(2)))
    )
    weight_decay: float = field(default=0.0, validator=[ge(0), lt(float("inf"))])
    max_grad_norm: float | None = field(default=cast("float | None", 1.0), validator=optional(gt(0)))
    groups: tuple[ParameterGroup, ...] = ()
    ema_decay: float | None = _ema_decay()


@frozen
class MuonSettings:
    """The numbers of Muon (Jordan et al. 2024) for matrices of layers and of AdamW for all other parameters, which may be others at every step.

    Muon's update is Nesterov's `momentum`, made orthogonal by 5 steps of Newton and Schulz in bfloat16, times 0.2 sqrt(max(rows, columns)), so
    that its size is that of AdamW's (Liu et al. 2025, eq. 4) and both have one `learning_rate`. `betas` and `epsilon` are AdamW's;
    `weight_decay` is decoupled in both; it and `max_grad_norm` as in `AdamWSettings`.
    """

    use: ClassVar[str] = "muon"
    learning_rate: float = field(default=1e-5, validator=[ge(0), lt(float("inf"))])
    momentum: float = field(default=0.95, validator=[ge(0), lt(1)])
    betas: tuple[float, float] = field(
        default=(0.9, 0.999), validator=deep_iterable(and_(ge(0.0), lt(1.0)), and_(min_len(2), max_len(2)))
    )
    epsilon: float = field(default=1e-8, validator=gt(0))
    weight_decay: float = field(default=0.0, validator=[ge(0), lt(float("inf"))])
    max_grad_norm: float | None = field(default=cast("float | None", 1.0), validator=optional(gt(0)))
    groups: tuple[ParameterGroup, ...] = ()
    ema_decay: float | None = _ema_decay()


OptimizerSettings = AdamWSettings | AdamW8BitSettings | SgdSettings | AdafactorSettings | LionSettings | MuonSettings
"""The numbers of a step, of the optimizer that `use` names. A run steps with one optimizer from its start to its end."""
OPTIMIZERS: Mapping[str, type[OptimizerSettings]] = {
    kind.use: kind for kind in (AdamWSettings, AdamW8BitSettings, SgdSettings, AdafactorSettings, LionSettings, MuonSettings)
}
"""Optimizers by name. Every backend has AdamW; each other one is a capability of that name."""
