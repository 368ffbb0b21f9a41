"""The ordered output for people and programs that want one dict per sample: the columns as they are, the dicts when asked for."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from attrs import frozen

from skyrl_engine.contracts import BatchOutput, BatchPlan, RankOutput
from skyrl_engine_mergers.ordered import OrderedMerger


@frozen(eq=False)
class ListedOutput(BatchOutput):
    """A `BatchOutput` that keeps its list of dicts.

    `fill` None: a sample's values are those of its scored tokens; a number: those of all its response tokens, with `fill` where a token was
    not scored.
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
        """`samples`: the same list every time."""
        return self.samples


@frozen
class ListMerger:
    """Merges as `OrderedMerger` does, and raises what it raises; `fill` is that of `ListedOutput`."""

    fill: float | None = None

    def merge(self, outputs: Sequence[RankOutput], plan: BatchPlan) -> ListedOutput:
        """The ordered output; its dicts are not made here."""
        merged = OrderedMerger().merge(outputs, plan)
        return ListedOutput(merged.sample_ids, merged.action_lengths, merged.scored, merged.fields, merged.metrics, self.fill)
