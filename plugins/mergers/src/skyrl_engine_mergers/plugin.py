"""Entry points of the mergers; a merger's own module is imported when a run makes it."""

from attrs import frozen

from skyrl_engine import hookimpl
from skyrl_engine.contracts import Merger


class OrderedPlugin:
    """`ordered`: every sample exactly once, in the order the caller gave them."""

    @hookimpl
    def skyrl_engine_make_merger(self) -> Merger:
        from skyrl_engine_mergers.ordered import OrderedMerger

        return OrderedMerger()


@frozen
class ListConfig:
    """Options of `list`."""

    fill: float | None = None
    """The value listed for a response token that was not scored; none: only scored tokens are listed."""


class ListPlugin:
    """`list`: the output of `ordered`, which also offers one dict per sample."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[ListConfig]:
        return ListConfig

    @hookimpl
    def skyrl_engine_make_merger(self, config: ListConfig) -> Merger:
        from skyrl_engine_mergers.listed import ListMerger

        return ListMerger(config.fill)


ordered = OrderedPlugin()
listed = ListPlugin()
