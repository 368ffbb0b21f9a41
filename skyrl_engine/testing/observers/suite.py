"""A pytest suite of the promises to observers; used as `LossConformance` is.

class TestMyObserver(ObserverConformance):
    plugin = "acme-observers:steps_csv"
"""

from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.observers.promises import OBSERVER_PROMISES


class ObserverConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the observer under test from `observer`."""

    kind = "observer"
    promises = OBSERVER_PROMISES

    def observer(self) -> object:
        """Make the observer under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `observer`")
