"""A pytest suite of the promises to mergers; used as `LossConformance` is.

class TestMyMerger(MergerConformance):
plugin = "acme-mergers:mine"
"""

from skyrl_engine.contracts.kinds.merger import Merger
from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.mergers.promises import MERGER_PROMISES


class MergerConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the merger under test from `merger`."""

    kind = "merger"
    promises = MERGER_PROMISES

    def merger(self) -> Merger:
        """Make the merger under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `merger`")
