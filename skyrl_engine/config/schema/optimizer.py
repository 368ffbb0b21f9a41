"""`[optimizer]`: the optimizer and its learning-rate schedule."""

from typing import Literal, cast

import attrs
from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, in_, lt, optional

from skyrl_engine.config.schema.metadata import READ_BY
from skyrl_engine.contracts.kinds.backend import OPTIMIZERS, OptimizerSettings

_BELOW_ONE = and_(ge(0.0), lt(1.0))
_ADAMW = ("use", ("adamw",))


@frozen
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    use: Literal["adamw", "sgd"] = field(default="adamw", validator=in_(tuple(OPTIMIZERS)))
    """The optimizer: `adamw`, or `sgd` (without momentum; it keeps no state, and takes far larger learning rates), where the backend has it."""

    learning_rate: float = field(default=1e-5, validator=gt(0))
    """Learning rate after warm-up."""

    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=deep_iterable(_BELOW_ONE), metadata={READ_BY: _ADAMW})
    """Decay rates of the first and the second moment of `adamw`."""

    epsilon: float = field(default=1e-8, validator=gt(0), metadata={READ_BY: _ADAMW})
    """Number added to the denominator of the update of `adamw`, for stability."""

    weight_decay: float = field(default=0.0, validator=ge(0))
    """Decoupled weight decay, of matrices only."""

    max_grad_norm: float | None = field(default=cast("float | None", 1.0), validator=optional(gt(0)))
    """Largest gradient norm: a larger gradient is scaled down to it; none: no clipping."""

    schedule: Literal["constant", "linear", "cosine"] = field(default="constant", validator=in_(("constant", "linear", "cosine")))
    """Course of the learning rate after warm-up; `linear` and `cosine` end at 0."""

    warmup_steps: int = field(default=0, validator=ge(0))
    """Optimizer steps of linear warm-up before the schedule."""

    def settings(self) -> OptimizerSettings:
        """Return the settings of the optimizer, with the learning rate after warm-up."""
        kind = OPTIMIZERS[self.use]
        return kind(**{number.name: getattr(self, number.name) for number in attrs.fields(kind)})
