"""Micro-batches with what a frozen teacher on this rank knows of them, each asked when the backend reaches it."""

from collections.abc import Iterator

from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.backend import MicroBatch, RankBatch, Teaches


@frozen(eq=False)
class TaughtBatch:
    """A `RankBatch` whose micro-batches carry `MicroBatch.teacher`.

    The teacher scores a micro-batch before the student does, in the same rows, and frees its memory after the student's backward pass.
    So one micro-batch's hidden states are held at a time, whatever the size of the step.
    """

    batch: RankBatch
    teacher: Teaches

    def __len__(self) -> int:
        return len(self.batch)

    def __iter__(self) -> Iterator[MicroBatch]:
        for micro_batch in self.batch:
            with self.teacher.teaching(micro_batch) as known:
                yield evolve(micro_batch, teacher=known)
