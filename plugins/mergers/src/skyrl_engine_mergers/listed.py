"""The ordered output with one dict per sample, made when it is first asked for."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from attrs import frozen

from skyrl_engine.contracts import BatchOutput, BatchPlan, RankOutput
from skyrl_engine_mergers.ordered import OrderedMerger


@frozen(eq=False)
class ListedOutput(BatchOutput):
    """A `BatchOutput` that also lists its samples as dicts.

    With `fill` None a sample lists the values of its scored tokens; with a number, those of all its response tokens, and `fill` for each
    token that was not scored.
    """

    fill: float | None = None

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """One dict per sample in the caller's order: `sample_id`, and each field as a plain list. Made at the first access, once."""
        fields = self.fields if self.fill is None else {name: self.on_actions(name, self.fill) for name in self.fields}
        flat = {name: (ragged.values.tolist(), ragged.offsets.tolist()) for name, ragged in fields.items()}
        return [
            {"sample_id": sample_id, **{name: values[offsets[i] : offsets[i + 1]] for name, (values, offsets) in flat.items()}}
            for i, sample_id in enumerate(self.sample_ids.tolist())
        ]

    def to_list(self) -> list[dict[str, Any]]:
        """Return `samples`, the same list at every call."""
        return self.samples


@frozen
class ListMerger:
    """Merges and raises as `OrderedMerger` does; `fill` is that of `ListedOutput`."""

    fill: float | None = None

    def merge(self, outputs: Sequence[RankOutput], plan: BatchPlan) -> ListedOutput:
        """Return the ordered output; its dicts are made when they are asked for."""
        merged = OrderedMerger().merge(outputs, plan)
        return ListedOutput(merged.sample_ids, merged.action_lengths, merged.scored, merged.fields, merged.metrics, self.fill)
