"""A pytest suite of the promises to estimators of advantages; used as `LossConformance` is.

    class TestMyAdvantage(AdvantageConformance):
        plugin = "acme-advantages:mine"

Add `oracle(self, batch)`, which returns the advantages [A] due, to be held to a definition of your own.
"""

from skyrl_engine.contracts.kinds.advantage import Advantage
from skyrl_engine.testing.advantages.promises import ADVANTAGE_PROMISES
from skyrl_engine.testing.conformance import Conformance


class AdvantageConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the estimator under test from `advantage`."""

    kind = "advantage"
    promises = ADVANTAGE_PROMISES
    offers = ("oracle",)

    def advantage(self) -> Advantage:
        """Make the estimator under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `advantage`")
