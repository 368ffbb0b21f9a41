"""`[training]`: the length of training, and the sizes of mini-batches and micro-batches."""

from attrs import field, frozen
from attrs.validators import ge, gt, optional

from skyrl_engine.contracts.values.plan import Layout


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
    """Rows per micro-batch; give this or `micro_batch_tokens`. With neither, each rank computes all its samples in one micro-batch."""

    micro_batch_tokens: int | None = field(default=None, validator=optional(ge(1)))
    """Most tokens per micro-batch, padding included; it takes as many rows as fit. Give this or `micro_batch_rows`."""

    shuffle: bool = True
    """Read the samples in a new random order in every epoch."""

    drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill a mini-batch; otherwise they train, as a smaller one."""

    skip_zero_gradients: bool = True
    """Compute samples without gradients whose advantages are all 0, for data with advantages, as `rl.skip_zero_gradients` says. Corrections,
    losses of pairs and dropout keep the gradient of every sample."""

    def layout(self, *, dp: int = 1, tp: int = 1, cp: int = 1, pp: int = 1) -> Layout:
        return Layout(
            dp=dp,
            tp=tp,
            cp=cp,
            pp=pp,
            micro_batch_rows=self.micro_batch_rows,
            micro_batch_tokens=self.micro_batch_tokens,
        )
