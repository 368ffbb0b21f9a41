"""`[training]`: how long to train and how a batch is cut."""

from attrs import field, frozen
from attrs.validators import ge, gt, optional

from skyrl_engine.contracts.values.plan import Layout


@frozen
class TrainingConfig:
    """The length of a training, and how each batch is cut."""

    steps: int | None = field(default=None, validator=optional(ge(1)))
    """Optimizer steps to train; give this or `epochs`."""

    epochs: float | None = field(default=None, validator=optional(gt(0)))
    """Passes over the data; give this or `steps`. With neither: one pass."""

    batch_size: int = field(default=32, validator=ge(1))
    """Samples of one optimizer step (a mini-batch), over all ranks; on average, where groups of other sizes must stay whole."""

    micro_batch_rows: int | None = field(default=None, validator=optional(ge(1)))
    """Rows of a micro-batch; give this or `micro_batch_tokens`. With neither: all samples of a rank at once."""

    micro_batch_tokens: int | None = field(default=None, validator=optional(ge(1)))
    """Tokens of a micro-batch, padding included: as many rows as fit. Give this or `micro_batch_rows`."""

    shuffle: bool = True
    """Read the samples in a new random order in every epoch."""

    def layout(self, *, dp: int = 1, tp: int = 1, cp: int = 1, pp: int = 1) -> Layout:
        return Layout(
            dp=dp,
            tp=tp,
            cp=cp,
            pp=pp,
            micro_batch_rows=self.micro_batch_rows,
            micro_batch_tokens=self.micro_batch_tokens,
        )
