"""A pytest suite of the promises to corrections; used as `LossConformance` is.

    class TestMyCorrection(CorrectionConformance):
        plugin = "acme-losses:mine"

Add `oracle(self, tokens)`, which returns the factors due, to be held to a definition of your own.
"""

from skyrl_engine.contracts.kinds.correction import Correction
from skyrl_engine.testing.conformance import Conformance
from skyrl_engine.testing.corrections.promises import CORRECTION_PROMISES


class CorrectionConformance(Conformance):
    """Subclass, name it `Test...`, and set `plugin`, or return the correction under test from `correction`."""

    kind = "correction"
    promises = CORRECTION_PROMISES
    offers = ("oracle",)

    def correction(self) -> Correction:
        """Make the correction under test, a new one in every call."""
        raise NotImplementedError("set `plugin`, or override `correction`")
