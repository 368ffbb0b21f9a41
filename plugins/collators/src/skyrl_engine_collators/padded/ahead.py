"""Micro-batches prepared ahead: a rank that builds one after the other gets several from one call of the kernels.

A small micro-batch takes longer to ask for than to write. What is prepared is handed out once; every other call builds again, so that the order
of calls changes no byte.
"""

from collections.abc import Callable, Sequence
from weakref import ref

from attrs import define, frozen

from skyrl_engine.contracts import DenseBatch, MicroBatchPlan, SampleColumns

MOST_BYTES = 2 << 20
"""Memory of what is prepared at a time, at most, the micro-batch that is asked for included; little enough to stay in a processor's cache."""


@frozen(eq=False)
class _Prepared:
    """Micro-batches of `columns` that wait to be asked for, by plan; `fields` are those that they have."""

    columns: ref[SampleColumns]
    fields: Sequence[str]
    batches: dict[MicroBatchPlan, DenseBatch]


@define(eq=False)
class Ahead:
    """Micro-batches prepared last, and the plan by which the next call shows that the caller follows the order. A copy begins with nothing."""

    _prepared: _Prepared | None = None
    _expected: ref[MicroBatchPlan] | None = None

    def __reduce__(self) -> tuple[type["Ahead"], tuple[()]]:
        return Ahead, ()

    def take(self, columns: SampleColumns, micro_batch: MicroBatchPlan, fields: Sequence[str]) -> DenseBatch | None:
        """Hand out this micro-batch, if it was prepared from these columns with these fields, and forget it."""
        prepared = self._prepared
        if prepared is None or prepared.fields != fields or prepared.columns() is not columns:
            return None
        return prepared.batches.pop(micro_batch, None)  # one step even where threads share a collator

    def choose(self, micro_batch: MicroBatchPlan, bytes_of: Callable[[MicroBatchPlan], int]) -> list[MicroBatchPlan]:
        """Return this micro-batch and those to build with it: those that follow, if the caller begins with the first or goes on in order."""
        chosen, following = [micro_batch], micro_batch.following
        expected, self._expected = self._expected, None
        if micro_batch.place == 0 or (expected is not None and expected() is micro_batch):
            left = MOST_BYTES - bytes_of(micro_batch)
            for later in following:
                left -= bytes_of(later)
                if left < 0:
                    break
                chosen.append(later)
        if len(following) >= len(chosen):
            self._expected = ref(following[len(chosen) - 1])
        return chosen

    def keep(
        self, columns: SampleColumns, fields: Sequence[str], plans: Sequence[MicroBatchPlan], built: Sequence[DenseBatch]
    ) -> DenseBatch:
        """Hand out the first of what was built, and keep the others."""
        self._prepared = _Prepared(ref(columns), fields, dict(zip(plans[1:], built[1:], strict=True))) if len(plans) > 1 else None
        return built[0]
