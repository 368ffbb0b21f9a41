"""The work that a plan makes of a batch: padding, tokens that are computed, and the largest micro-batch."""

from attrs import frozen

from skyrl_engine.contracts.values.plan import BatchPlan


@frozen
class BatchShape:
    """`padding_share` (0 to 1) is that of the dense tokens, `computed_share` the number of dense tokens per token of a sample, and `largest`
    the number of dense tokens of the largest micro-batch.
    """

    padding_share: float
    computed_share: float
    largest: int

    @classmethod
    def of(cls, plan: BatchPlan, tokens: int) -> "BatchShape":
        """The shape of a plan whose samples have so many tokens."""
        dense, largest = plan.dense_tokens, max((batch.dense_tokens for batch in plan.micro_batches), default=0)
        real = tokens - (plan.shared_tokens or 0)
        return cls(1 - real / dense if dense else 0.0, dense / tokens if tokens else 0.0, largest)

    def __str__(self) -> str:
        return (
            f"padding {self.padding_share:.1%}, {self.computed_share:.2f} tokens computed per token of a sample, at most {self.largest:,} in a "
            "micro-batch"
        )
