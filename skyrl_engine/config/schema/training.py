"""`[training]`: the length of training, and the sizes of mini-batches and micro-batches."""

from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, gt, optional

from skyrl_engine.config.schema.auto_or import AutoOr


@frozen
class TrainingConfig:
    """The length of training, and the sizes of mini-batches and micro-batches."""

    steps: int | None = field(default=None, validator=optional(ge(1)))
    """Optimizer steps to train; give this or `epochs`."""

    epochs: float | None = field(default=None, validator=optional(gt(0)))
    """Passes over the data; give this or `steps`. With neither: one pass."""

    batch_size: int = field(default=32, validator=ge(1))
    """Samples per optimizer step (a mini-batch), over all ranks; an average where groups, which stay whole, do not divide it."""

    micro_batch_rows: int | None = field(default=None, validator=optional(ge(1)))
    """Rows per micro-batch, of one sample each; give this or `micro_batch_tokens`."""

    micro_batch_tokens: Literal["auto"] | int | None = field(default="auto", validator=AutoOr(optional(ge(1))))
    """Most tokens that a micro-batch computes, padding included. `auto`: 2,048 on CPU, planned from the model and the memory of the device
    elsewhere, and never less than the largest sample or pair takes. none: each rank computes all its samples in one micro-batch. Give this
    or `micro_batch_rows`."""

    shuffle: bool = True
    """Read the samples in a new random order in every epoch."""

    drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill a mini-batch; otherwise they train, as a smaller one."""

    skip_zero_gradients: bool = True
    """Compute samples without gradients whose advantages are all 0, for data with advantages, as `rl.skip_zero_gradients` says. Corrections,
    losses of pairs and dropout keep the gradient of every sample."""
