"""Entry point of the mergers; the merging itself is imported when a run makes it."""

from skyrl_engine import hookimpl
from skyrl_engine.contracts.merger import Merger


class OrderedPlugin:
    """`ordered`: every sample exactly once, in the order the caller gave them."""

    @hookimpl
    def skyrl_engine_make_merger(self) -> Merger:
        from skyrl_engine_mergers.ordered import OrderedMerger

        return OrderedMerger()


ordered = OrderedPlugin()
