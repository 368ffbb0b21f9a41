"""`[optimizer]`: the optimizer and its learning-rate schedule."""

from typing import Final, Literal, cast, get_args

import attrs
from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, in_, le, lt, min_len, optional

from skyrl_engine.config.schema.metadata import READ_BY
from skyrl_engine.config.wording import RefusedError, not_a_choice
from skyrl_engine.contracts.kinds.optimizer_settings import OPTIMIZERS, OptimizerSettings, ParameterGroup
from skyrl_engine.contracts.values.model import BUILT_IN, PLACE

Schedule = Literal["constant", "linear", "cosine", "cosine_with_min", "polynomial", "inverse_sqrt", "wsd"]
"""Built-in courses of the learning rate; `engine.schedule` has their formulas."""
SCHEDULES: Final[tuple[str, ...]] = get_args(Schedule)
Form = Literal["linear", "cosine", "1-sqrt"]
"""Forms of a warm-up, and of the decay of `wsd`."""

_WITH_MINIMUM: Final = ("cosine_with_min", "polynomial", "wsd")
_BELOW_ONE = and_(ge(0.0), lt(1.0))


def _require_schedule(_instance: object, _attribute: object, value: str) -> None:
    if value not in SCHEDULES and ":" not in value:
        refusal = not_a_choice(value, SCHEDULES)
        raise RefusedError(f"{refusal.cause}, and no function", f"{refusal.remedy}, or write ./file.py:name")


@frozen
class ParameterGroupTable:
    """Parameters with numbers of their own."""

    match: str = field(validator=min_len(1))
    """Pattern of whole parameter names, in which `*` stands for anything, `?` for a character and `[0-3]` for one of several, such as
    `model.layers.[0-3].*`; a parameter is in the first group that matches it. A pattern that matches no trained parameter is refused."""

    learning_rate: float | None = field(default=None, validator=optional(gt(0)))
    """Learning rate after warm-up, which takes the course of the schedule; none: that of `optimizer.learning_rate`."""

    weight_decay: float | None = field(default=None, validator=optional(ge(0)))
    """Decoupled weight decay, of matrices only; none: that of `optimizer.weight_decay`."""


@frozen
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    use: Literal["adamw", "adamw_8bit", "sgd", "adafactor", "lion", "muon"] = field(
        default="adamw", validator=in_(tuple(OPTIMIZERS))
    )
    """The optimizer: `adamw`, or, where the backend has it, `adamw_8bit` (moments of layers in 8 bits), `sgd` (without
    momentum; it keeps no state, and takes far larger learning rates), `adafactor` (numbers per row and column in the place of moments), `lion`
    (one moment, of which it takes the sign) or `muon` (for matrices of layers; the rest steps by AdamW)."""

    learning_rate: float = field(default=1e-5, validator=gt(0))
    """Learning rate after warm-up."""

    betas: tuple[float, float] | None = field(
        default=cast("tuple[float, float] | None", None),
        validator=optional(deep_iterable(_BELOW_ONE)),
        metadata={READ_BY: ("use", ("adamw", "adamw_8bit", "lion", "muon"))},
    )
    """Decay rates of the moments: the first and the second of `adamw` and `adamw_8bit`, which `muon` has for the rest; the update's and the
    moment's of `lion`. none: (0.9, 0.999), and (0.9, 0.99) of `lion`."""

    epsilon: float = field(default=1e-8, validator=gt(0), metadata={READ_BY: ("use", ("adamw", "adamw_8bit", "muon"))})
    """Number added to the denominator of the update of `adamw` and `adamw_8bit`, for stability."""

    momentum: float = field(default=0.95, validator=_BELOW_ONE, metadata={READ_BY: ("use", ("muon",))})
    """Momentum of `muon`."""

    weight_decay: float = field(default=0.0, validator=ge(0))
    """Decoupled weight decay, of matrices only."""

    max_grad_norm: float | None = field(default=cast("float | None", 1.0), validator=optional(gt(0)))
    """Largest gradient norm: a larger gradient is scaled down to it; none: no clipping."""

    stochastic_rounding: bool = field(default=False, metadata={READ_BY: ("use", ("adamw",))})
    """Hold the trained weights in bfloat16 alone, without float32 master weights, and round each step of `adamw` up or down at random, so that
    its mean is exact; where the backend has it, with `model.dtype = "bfloat16"`. Saves 2 bytes for each trained number."""

    ema_decay: float | None = field(default=cast("float | None", None), validator=optional(and_(gt(0), lt(1))))
    """Decay of an exponential moving average of the trained weights, such as 0.999, which checkpoints hold and `export --ema` writes: after
    every step `ema_decay * average + (1 - ema_decay) * weight`. none: no average."""

    schedule: Schedule | str = field(
        default="constant", validator=_require_schedule, metadata={PLACE: "reference", BUILT_IN: SCHEDULES}
    )
    """Course of the learning rate after warm-up: `linear` and `cosine` end at 0, `cosine_with_min` and `polynomial` at `min_ratio` of the rate,
    `wsd` (warm-up, stable, decay) falls to it in the last `decay_steps` steps, and `inverse_sqrt` falls without an end. Or a function,
    `./file.py:name` or `package.module:name`, of the step after the warm-up and the number of steps after it, that returns a factor."""

    warmup_steps: int = field(default=0, validator=ge(0))
    """Optimizer steps of warm-up before the schedule."""

    warmup: Form = field(default="linear", validator=in_(get_args(Form)))
    """Form of the warm-up from 0 to the rate: a line, half a cosine, or 1 - sqrt(1 - x)."""

    min_ratio: float = field(default=0.0, validator=[ge(0.0), le(1.0)], metadata={READ_BY: ("schedule", _WITH_MINIMUM)})
    """Part of `learning_rate` at which `cosine_with_min`, `polynomial` and `wsd` end."""

    decay_steps: int | None = field(default=None, validator=optional(ge(1)), metadata={READ_BY: ("schedule", ("wsd",))})
    """Optimizer steps of the decay at the end of `wsd`."""

    decay: Form = field(default="cosine", validator=in_(get_args(Form)), metadata={READ_BY: ("schedule", ("wsd",))})
    """Form of the decay of `wsd`: a line, half a cosine, or 1 - sqrt(x)."""

    power: float = field(default=1.0, validator=gt(0.0), metadata={READ_BY: ("schedule", ("polynomial",))})
    """Power of `polynomial`: 1 is a line."""

    timescale: int | None = field(default=None, validator=optional(ge(1)), metadata={READ_BY: ("schedule", ("inverse_sqrt",))})
    """Steps t of `inverse_sqrt`, sqrt(t / (t + steps since the warm-up)). none: `warmup_steps`, or 10,000 without a warm-up."""

    groups: tuple[ParameterGroupTable, ...] = ()
    """`[[optimizer.groups]]`: parameters with numbers of their own, by patterns of their names, where the backend has them."""

    @property
    def names_function(self) -> bool:
        """Return True where `schedule` names a function."""
        return self.schedule not in SCHEDULES

    def settings(self) -> OptimizerSettings:
        """Return the settings of the optimizer, with the learning rate after warm-up."""
        kind = OPTIMIZERS[self.use]
        numbers = {number.name: getattr(self, number.name) for number in attrs.fields(kind)}
        numbers["groups"] = tuple(
            ParameterGroup(
                match=table.match,
                rate_factor=1.0 if table.learning_rate is None else table.learning_rate / self.learning_rate,
                weight_decay=table.weight_decay,
            )
            for table in self.groups
        )
        if self.betas is None:
            numbers.pop("betas", None)
        return kind(**numbers)
