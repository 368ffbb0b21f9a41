"""A pytest suite of the promises to group filters; used as `LossConformance` is.

    class TestMyFilter(GroupFilterConformance):
        plugin = "acme-filters:mine"

Add `oracle(self, group)`, which returns the answer due, to be held to a definition of your own.
"""

from skyrl_engine.contracts.kinds.group_filter import GroupFilter
from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.group_filters.promises import GROUP_FILTER_PROMISES


class GroupFilterConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the filter under test from `group_filter`."""

    kind = "group_filter"
    promises = GROUP_FILTER_PROMISES
    offers = ("oracle",)

    def group_filter(self) -> GroupFilter:
        """Make the filter under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `group_filter`")
