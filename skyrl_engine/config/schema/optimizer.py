"""`[optimizer]`: AdamW and its learning-rate schedule."""

from typing import Literal, cast

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, in_, lt, optional

from skyrl_engine.contracts.kinds.backend import AdamWSettings

_BELOW_ONE = and_(ge(0.0), lt(1.0))


@frozen
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    learning_rate: float = field(default=1e-5, validator=gt(0))
    """Learning rate after warm-up."""

    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=deep_iterable(_BELOW_ONE))
    """Decay rates of the first and the second moment."""

    epsilon: float = field(default=1e-8, validator=gt(0))
    """Number added to the denominator of the update, for stability."""

    weight_decay: float = field(default=0.0, validator=ge(0))
    """Decoupled weight decay, of matrices only."""

    max_grad_norm: float | None = field(default=cast("float | None", 1.0), validator=optional(gt(0)))
    """Largest gradient norm: a larger gradient is scaled down to it; none: no clipping."""

    schedule: Literal["constant", "linear", "cosine"] = field(default="constant", validator=in_(("constant", "linear", "cosine")))
    """Course of the learning rate after warm-up; `linear` and `cosine` end at 0."""

    warmup_steps: int = field(default=0, validator=ge(0))
    """Optimizer steps of linear warm-up before the schedule."""

    def settings(self) -> AdamWSettings:
        """Return the settings of AdamW, with the learning rate after warm-up."""
        return AdamWSettings(
            learning_rate=self.learning_rate,
            betas=self.betas,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )
